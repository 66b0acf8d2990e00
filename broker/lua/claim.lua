#!lua
-- claim: take the best jobs of a model, open an attempt of each in its log, and lease them to a replica.
-- Reads and writes: queue, ages (zset), load, fair, drain, job (hash), log (stream), leases, deadlines, overrun (zset),
-- held (set), idle (list).
-- ARGV: 1 replica, 2 model, 3 how many, 4 lease ms
-- Returns a list of {job, spec, attempt, id it continues from, waited ms, readers}. Fewer than asked for: the replica
-- is entered as idle in the same step, so that no wake-up is lost. A lost reply is mended by `tick`.
local replica, model, wanted = ARGV[1], ARGV[2], tonumber(ARGV[3])
local now, claims = clock(), {}

local function open(job)
  local f = redis.call('HMGET', K.job .. job, 'spec', 'enqueued_ms', 'ttl_ms')
  local after = f[1] and last_id(job)
  if not after then return end -- it expired while it waited
  local usage = finished_usage(job)
  if usage then redis.call('HSET', K.job .. job, 'usage', usage) end
  local attempt = next_attempt(job, now)
  redis.call('HSET', K.job .. job, 'worker', replica)
  append(job, attempt .. '-0', pack_entry(now, tonumber(f[2]), { TAG.claimed, replica, after }), now)
  redis.call('ZADD', K.leases, now + ARGV[4], job)
  redis.call('SADD', K.held .. replica, job)
  redis.call('ZREM', K.deadlines, job)
  start_wall(job, now)
  keep(K.leases, f[3])
  keep(K.held .. replica, f[3])
  claims[#claims + 1] = { job, f[1], attempt, after, now - f[2], pods_of(job, now) }
end

for _, band in ipairs(BANDS) do
  while #claims < wanted do
    local best = redis.call('ZRANGE', K.queue .. model .. ':' .. band, 0, 0, 'WITHSCORES')
    if not best[1] then break end
    dequeue(model, band, best[1])
    advance(model, band, tonumber(best[2]))
    open(job_of(best[1]))
  end
end
note_drain(model, #claims, now)
redis.call('LREM', K.idle .. model, 0, replica)
if #claims < wanted then
  redis.call('RPUSH', K.idle .. model, replica)
  keep(K.idle .. model, IDLE_TTL_MS)
end
return claims
