#!lua
-- admit: store a job, open its log, queue it, enter the pod as its reader, and wake one idle replica; or refuse it.
-- Reads and writes: job (hash), log (stream), readers (hash), queue, ages (zset), load, fair (hash), unread,
-- deadlines (zset), models (set), arrived (hash). Reads drain (hash).
-- ARGV: 1 job, 2 spec, 3 view, 4 model, 5 band, 6 pod or '', 7 grace ms (-1: never cancelled for want of readers),
--       8 reader lease ms, 9 queue timeout ms, 10 TTL ms until its end, 11 log TTL ms, 12 max deaths,
--       13 owner, 14 prompt tokens, 15 cost in tokens, 16 weight, 17 share of the bounds from which on batch is refused,
--       18 to 20 bounds of the model in jobs, bytes, prompt tokens, 21 to 23 bounds of the owner, '' for none,
--       24 max run ms, 25 '1' to keep what it asks for after its end, 26 anchors of its prompt's prefix or ''
-- Returns {'admitted', last id, now} | {'known', last id} | {'no_capacity'}
--       | {'queue_full' or 'owner_queue_full', waiting jobs, retry after s}. A full queue makes room by ending batch jobs.
-- Safe to repeat: a known id answers what is there.
local job, model, band, pod, grace_ms = ARGV[1], ARGV[4], ARGV[5], ARGV[6], tonumber(ARGV[7])
local owner, bytes, tokens = ARGV[13], #ARGV[2], tonumber(ARGV[14])
local MAX_SHED = 16 -- batch jobs that end for one that comes

-- Is one of three bounds, from ARGV[first] on, reached? So a single job always fits, however large it is.
local function is_full(waiting, first, share)
  for i = 1, 3 do
    local bound = tonumber(ARGV[first + i - 1])
    if bound and waiting[i] >= bound * share then return true end
  end
  return false
end

local function waiting_of(suffix)
  local f = redis.call('HMGET', K.load .. model, 'jobs' .. suffix, 'bytes' .. suffix, 'tokens' .. suffix)
  return { tonumber(f[1] or 0), tonumber(f[2] or 0), tonumber(f[3] or 0) }
end

-- The batch jobs that must end so that the queue is not full, youngest first; nil if they are not enough: then none ends
-- in vain.
local function to_shed(waiting)
  local shed = {}
  for _, member in ipairs(redis.call('ZREVRANGE', K.ages .. model .. ':batch', 0, MAX_SHED - 1)) do
    local f = redis.call('HMGET', K.job .. job_of(member), 'bytes', 'tokens')
    if f[1] then
      waiting = { waiting[1] - 1, waiting[2] - f[1], waiting[3] - f[2] }
      shed[#shed + 1] = job_of(member)
    end
    if not is_full(waiting, 18, 1) then return shed end
  end
end

-- A tenth of the time in which the queue drains at the rate of the last half minute: places come free all the time.
local function retry_after_s(jobs, now)
  local count = drained(model, now)
  if not count then return 5 end
  return math.max(1, math.min(60, math.ceil(0.1 * jobs / (count / (DRAIN_MS / 1000)))))
end

if redis.call('EXISTS', K.job .. job) == 1 then return { 'known', last_id(job) or '' } end
local now = clock()
if not is_served(model, now) then return { 'no_capacity' } end
local waiting, own = waiting_of(''), waiting_of(':' .. owner)
if is_full(own, 21, 1) then return { 'owner_queue_full', own[1], retry_after_s(own[1], now) } end
if is_full(waiting, 18, band == 'batch' and tonumber(ARGV[17]) or 1) then
  local shed = band ~= 'batch' and to_shed(waiting)
  if not shed then return { 'queue_full', waiting[1], retry_after_s(waiting[1], now) } end
  for _, each in ipairs(shed) do
    finish_unrun(each, 'failed', 'queue_full', 'this batch request made room for one that is more urgent', now)
  end
end

local ttl_ms, charge = tonumber(ARGV[10]), ARGV[15] / ARGV[16]
local tag = exact(start_tag(model, band, owner, charge, ttl_ms))
redis.call('HSET', K.job .. job, 'spec', ARGV[2], 'view', ARGV[3], 'model', model, 'attempt', 0, 'deaths', 0,
  'tag', tag, 'grace_ms', grace_ms, 'log_ttl_ms', ARGV[11], 'ttl_ms', ttl_ms, 'max_deaths', ARGV[12],
  'enqueued_ms', text(now), 'age', serial(ttl_ms), 'band', band, 'owner', owner, 'bytes', bytes, 'tokens', tokens,
  'cost', ARGV[15], 'weight', ARGV[16], 'max_run_ms', ARGV[24])
if ARGV[25] == '1' then redis.call('HSET', K.job .. job, 'is_kept', 1) end
if ARGV[26] ~= '' then redis.call('HSET', K.job .. job, 'prefix', ARGV[26]) end
redis.call('XADD', K.log .. job, '0-1', 'e', pack_entry(now, now, { TAG.queued, now }))
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
redis.call('HINCRBY', K.arrived .. model, 'jobs', 1)
redis.call('HINCRBY', K.arrived .. model, 'tokens', tokens)
keep(K.arrived .. model, ttl_ms)
return { 'admitted', '0-1', now }
