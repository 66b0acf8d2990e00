#!lua
-- admit: store a job, open its log, queue it, enter the pod as its reader, and wake one idle replica; or refuse it.
-- Reads and writes: job (hash), log (stream), readers (hash), queue (zset), unread, deadlines (zset), models (set).
-- ARGV: 1 job, 2 spec, 3 view, 4 model, 5 band, 6 pod or '', 7 grace ms (-1: never cancelled for want of readers),
--       8 reader lease ms, 9 queue timeout ms, 10 max run ms, 11 log TTL ms, 12 max waiting jobs, 13 max deaths
-- Returns {'admitted', last id, now} | {'known', last id} | {'no_capacity'} | {'queue_full', waiting}.
-- Safe to repeat: a known id answers what is there.
local job, model, band, pod, grace_ms = ARGV[1], ARGV[4], ARGV[5], ARGV[6], tonumber(ARGV[7])
if redis.call('EXISTS', K.job .. job) == 1 then return { 'known', last_id(job) or '' } end

local now = clock()
if not is_served(model, now) then return { 'no_capacity' } end
local waiting = 0
for _, each in ipairs(BANDS) do waiting = waiting + redis.call('ZCARD', K.queue .. model .. ':' .. each) end
if waiting >= tonumber(ARGV[12]) then return { 'queue_full', waiting } end

local ttl_ms = ARGV[9] + ARGV[10] + ARGV[11]
local tag = serial(ttl_ms)
redis.call('HSET', K.job .. job, 'spec', ARGV[2], 'view', ARGV[3], 'model', model, 'attempt', 0, 'deaths', 0,
  'tag', tag, 'grace_ms', grace_ms, 'log_ttl_ms', ARGV[11], 'ttl_ms', ttl_ms, 'max_deaths', ARGV[13],
  'enqueued_ms', text(now))
redis.call('XADD', K.log .. job, '0-1', 'e', pack_entry(now, now, { TAG.queued, now }))
redis.call('HSET', K.job .. job, 'max_run_ms', ARGV[10])
redis.call('PEXPIRE', K.job .. job, ttl_ms)
redis.call('PEXPIRE', K.log .. job, ttl_ms)
redis.call('ZADD', K.deadlines, now + ARGV[9], job)
local reading_ms = pod ~= '' and tonumber(ARGV[8]) or 0
if reading_ms > 0 then
  redis.call('HSET', K.readers .. job, pod, text(now + reading_ms))
  redis.call('PEXPIRE', K.readers .. job, ttl_ms)
end
if grace_ms >= 0 then redis.call('ZADD', K.unread, now + reading_ms + grace_ms, job) end
for _, key in ipairs({ K.deadlines, K.unread }) do keep(key, ttl_ms) end
enqueue(job, model, band, tag, ttl_ms)
return { 'admitted', '0-1', now }
