#!lua flags=allow-oom
-- status: where one job is.
-- Reads: job (hash), log (stream), queue (zset). Writes nothing.
-- ARGV: 1 job, 2 '' or its owner: for others it is not there
-- Returns {} if there is no such job, or it was forgotten, else {view, 'waiting' | 'running' | done | cancelled | failed, last id, attempt,
-- jobs before it in the queue or -1, deaths, readers that came after its first}.
local job = ARGV[1]
local f = redis.call('HMGET', K.job .. job, 'view', 'ended', 'place', 'model', 'attempt', 'deaths', 'age', 'is_forgotten', 'owner', 'resumes')
if not f[1] or f[8] or (ARGV[2] ~= '' and ARGV[2] ~= f[9]) then return {} end
local state, ahead = f[2] or (f[3] and 'waiting' or 'running'), -1
if state == 'waiting' then
  ahead = 0
  for _, band in ipairs(BANDS) do
    local queue = K.queue .. f[4] .. ':' .. band
    if band == f[3] then
      ahead = ahead + (redis.call('ZRANK', queue, member_of(f[7], job)) or 0)
      break
    end
    ahead = ahead + redis.call('ZCARD', queue)
  end
end
return { f[1], state, last_id(job) or '', f[5], ahead, f[6], f[10] or '0' }
