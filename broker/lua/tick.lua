#!lua flags=allow-oom
-- tick: what a replica must know ten times a second: cancels, lost leases, changed readers; and it renews its leases.
-- Reads and writes: news (zset), counter (int), job, readers (hash), held (set), leases (zset).
-- ARGV: 1 replica, 2 serial of the last news it has seen, 3 lease ms, 4 '1' to renew, 5 '1' to list what it holds
-- Returns {newest serial, number of leases held, {{job, attempt if it still holds it else '', cancel cause, readers}...},
-- {jobs held}}. Overdue leases that are still there are renewed too. Safe to repeat: news stay until they are seen.
local replica, now, seen = ARGV[1], clock(), ARGV[2]
-- the counter begins anew after a long silence or a loss of data; news must not look old then
if tonumber(seen) > tonumber(redis.call('GET', K.counter) or 0) then seen = '0' end
redis.call('ZREMRANGEBYSCORE', K.news .. replica, '-inf', seen)
local newest, changed = seen, {}
local listed = redis.call('ZRANGE', K.news .. replica, 0, -1, 'WITHSCORES')
for i = 1, #listed, 2 do
  local job = listed[i]
  newest = listed[i + 1]
  local f = redis.call('HMGET', K.job .. job, 'attempt', 'worker', 'cancel')
  changed[#changed + 1] = { job, f[2] == replica and f[1] or '', f[3] or '', pods_of(job, now) }
end
local held = {}
if ARGV[4] == '1' or ARGV[5] == '1' then held = redis.call('SMEMBERS', K.held .. replica) end
if ARGV[4] == '1' then
  for _, job in ipairs(held) do redis.call('ZADD', K.leases, 'XX', now + ARGV[3], job) end
end
return { newest, redis.call('SCARD', K.held .. replica), changed, ARGV[5] == '1' and held or {} }
