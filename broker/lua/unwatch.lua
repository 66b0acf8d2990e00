#!lua flags=allow-oom
-- unwatch: a pod ends its reading leases; the last reader that leaves starts the grace time, or cancels if it is 0.
-- Reads and writes: job, readers (hash), unread, news (zset), and what `cancel` does.
-- ARGV: 1 pod, then pairs of job and '' or the grace ms that this reader asked for in place of the job's own
-- Returns the number of jobs that were marked or ended. Safe to repeat.
local pod, now, cancelled = ARGV[1], clock(), 0
for i = 2, #ARGV, 2 do
  local job = ARGV[i]
  local f = redis.call('HMGET', K.job .. job, 'ended', 'worker', 'grace_ms', 'ttl_ms')
  local left = redis.call('HDEL', K.readers .. job, pod) == 1
  if left and f[4] and not f[1] then
    if f[2] then news(f[2], job, f[4]) end
    local grace_ms = tonumber(ARGV[i + 1] ~= '' and ARGV[i + 1] or f[3])
    if #pods_of(job, now) == 0 then
      redis.call('ZREM', K.unread, job)
      if grace_ms > 0 then
        redis.call('ZADD', K.unread, now + grace_ms, job)
        keep(K.unread, f[4])
      elseif grace_ms == 0 then
        cancel(job, 'disconnect', now)
        cancelled = cancelled + 1
      end
    end
  end
end
return cancelled
