#!lua flags=allow-oom
-- expire: a dead letter is kept no longer; what is left of it lives as long as any other ended job.
-- Reads and writes: dead (zset), job, readers (hash), log (stream).
-- ARGV: 1 job
-- Returns 1 if it was a dead letter, else 0. Safe to repeat.
local job = ARGV[1]
if redis.call('ZREM', K.dead, job) == 0 then return 0 end
local log_ttl_ms = redis.call('HGET', K.job .. job, 'log_ttl_ms')
if log_ttl_ms then
  redis.call('HDEL', K.job .. job, 'spec')
  for _, kind in ipairs({ K.job, K.log, K.readers }) do redis.call('PEXPIRE', kind .. job, log_ttl_ms) end
end
return 1
