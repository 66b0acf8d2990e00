#!lua flags=allow-oom
-- forget: nobody finds a job any more; one that has not ended is cancelled.
-- Reads and writes: job, readers (hash), log (stream), and what `cancel` does.
-- ARGV: 1 job
-- Returns 1, or 0 if there is no such job. What readers have not taken yet stays for FORGET_MS. Safe to repeat.
local FORGET_MS = 10000
local job, now = ARGV[1], clock()
local f = redis.call('HMGET', K.job .. job, 'enqueued_ms', 'is_forgotten')
if not f[1] or f[2] then return 0 end
redis.call('HSET', K.job .. job, 'is_forgotten', 1, 'log_ttl_ms', FORGET_MS)
redis.call('HDEL', K.job .. job, 'is_kept')
if cancel(job, 'delete', now) == 'ended' then
  redis.call('HDEL', K.job .. job, 'spec')
  for _, kind in ipairs({ K.job, K.log, K.readers }) do redis.call('PEXPIRE', kind .. job, FORGET_MS) end
end
return 1
