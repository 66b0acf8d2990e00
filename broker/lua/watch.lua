#!lua flags=allow-oom
-- watch: a pod opens or renews its reading leases.
-- Reads and writes: job, readers (hash), unread, news (zset); an ended log lives on while it is read.
-- ARGV: 1 pod, 2 reader lease ms, 3 '1' if a reader has come to each that is not its first: it is counted; then jobs
-- Returns a list as long as the jobs: 'ok' or 'gone'. Safe to repeat; a reader may be counted twice then.
local pod, lease_ms, now, states = ARGV[1], ARGV[2], clock(), {}
for i = 4, #ARGV do
  local job = ARGV[i]
  local f = redis.call('HMGET', K.job .. job, 'ended', 'worker', 'grace_ms', 'log_ttl_ms', 'ttl_ms')
  states[#states + 1] = f[5] and 'ok' or 'gone'
  if f[5] then
    if ARGV[3] == '1' then redis.call('HINCRBY', K.job .. job, 'resumes', 1) end
    local is_new = redis.call('HSET', K.readers .. job, pod, text(now + lease_ms)) == 1
    if f[1] then
      for _, kind in ipairs({ K.job, K.log, K.readers }) do keep(kind .. job, math.max(f[4], lease_ms)) end
    else
      keep(K.readers .. job, f[5])
      if tonumber(f[3]) >= 0 then
        redis.call('ZADD', K.unread, 'GT', now + lease_ms + f[3], job)
        keep(K.unread, f[5])
      end
      if is_new and f[2] then news(f[2], job, f[5]) end
    end
  end
end
return states
