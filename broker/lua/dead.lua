#!lua flags=allow-oom
-- dead: the dead letters of a shard, those that died last first, or one of them.
-- Reads: dead (zset), job (hash). Writes: dead, without those whose job has expired.
-- ARGV: 1 how many at most, 2 job or ''
-- Returns a list of {spec, view, deaths, epoch ms of the last, how it lost its last worker, which one}. Safe to repeat.
local letters, jobs = {}, { ARGV[2] }
if ARGV[2] == '' then jobs = redis.call('ZRANGE', K.dead, 0, ARGV[1] - 1, 'REV') end
for _, job in ipairs(jobs) do
  local died = redis.call('ZSCORE', K.dead, job)
  local f = redis.call('HMGET', K.job .. job, 'spec', 'view', 'deaths', 'died_of', 'died_with')
  if died and f[1] then
    letters[#letters + 1] = { f[1], f[2], f[3], died, f[4], f[5] }
  else
    redis.call('ZREM', K.dead, job)
  end
end
return letters
