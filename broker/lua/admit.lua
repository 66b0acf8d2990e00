#!lua
-- admit: store a job, open its log, queue it, enter the pod as its reader, and wake one idle replica; or refuse it.
-- Reads and writes: job (hash), log (stream), readers (hash), queue, ages (zset), load, fair (hash), unread,
-- deadlines (zset), models (set), arrived, spent (hash), slots (zset). Reads drain (hash), poison (string).
-- ARGV: 1 job, 2 spec, 3 view, 4 model, 5 band, 6 pod or '', 7 grace ms (-1: never cancelled for want of readers),
--       8 reader lease ms, 9 queue timeout ms, 10 TTL ms until its end, 11 log TTL ms, 12 max deaths,
--       13 owner, 14 prompt tokens, 15 cost in tokens, 16 weight, 17 share of the bounds from which on batch is refused,
--       18 to 20 bounds of the model in jobs, bytes, prompt tokens, 21 to 23 bounds of the owner, '' for none,
--       24 max run ms, 25 '1' to keep what it asks for after its end, 26 anchors of its prompt's prefix or '', 27 '' or the
--       limits, as msgpack: the key's id, then of the key and of its owner a list of requests a minute, tokens a minute,
--       tokens a day, jobs, streams (false: no limit), 28 '1' if it streams, 29 digest of the request and its owner, or ''
-- Returns {'admitted', last id, now, requests, tokens} | {'known', last id} | {'no_capacity', why or ''} | {'poisoned', ms left}
--       | {'limit', 'key' or 'owner', which one, the limit, retry after ms, requests, tokens}: the last two are how the
--       tighter of the limits stands, {limit, left, ms until it is whole again}, or {} where there is none
--       | {'queue_full' or 'owner_queue_full', waiting jobs, retry after s}. A full queue makes room by ending batch jobs.
-- Safe to repeat: a known id answers what is there.
local job, model, band, pod, grace_ms = ARGV[1], ARGV[4], ARGV[5], ARGV[6], tonumber(ARGV[7])
local owner, bytes, tokens = ARGV[13], #ARGV[2], tonumber(ARGV[14])
local MAX_SHED = 16 -- batch jobs that end for one that comes
local MAX_LOOKED_AT = 32 -- places whose job is looked for when none is free
local EPSILON = 1e-6

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

-- How the limits of a key or an owner stand: the buckets of requests and tokens lose in a minute what they hold.
local function spent_of(subject, limits, now)
  local f = redis.call('HMGET', K.spent .. subject, 'requests', 'tokens', 'at', 'day', 'today')
  local day, minutes = math.floor(now / DAY_MS), math.max(0, now - (f[3] or 0)) / 60000
  local spent = { day = day, today = tonumber(f[4]) == day and tonumber(f[5]) or 0 }
  spent.requests = limits[1] and math.max(0, (f[1] or 0) - minutes * limits[1]) or 0
  spent.tokens = limits[2] and math.max(0, (f[2] or 0) - minutes * limits[2]) or 0
  return spent
end

-- How many places are taken. A job gives its own back when it ends; one that is gone without an end is found out when it
-- matters, and every place runs out by itself.
local function taken(key, limit, now)
  redis.call('ZREMRANGEBYSCORE', key, '-inf', text(now))
  if redis.call('ZCARD', key) >= limit then
    for _, each in ipairs(redis.call('ZRANGE', key, 0, MAX_LOOKED_AT - 1)) do
      local f = redis.call('HMGET', K.job .. each, 'owner', 'ended')
      if f[2] or not f[1] then redis.call('ZREM', key, each) end
    end
  end
  return redis.call('ZCARD', key)
end

-- Which limit keeps the job out, if one does: its name, itself, and ms until it would not. What asks for more than a
-- bucket holds is let in when that is whole, and leaves a debt.
local function breach(subject, limits, spent, cost, now)
  if limits[1] and spent.requests + 1 > limits[1] + EPSILON then
    return 'requests_per_minute', limits[1], (spent.requests + 1 - limits[1]) / limits[1] * 60000
  end
  local over = limits[2] and spent.tokens + math.min(cost, limits[2]) - limits[2]
  if over and over > EPSILON then return 'tokens_per_minute', limits[2], over / limits[2] * 60000 end
  if limits[3] and spent.today + math.min(cost, limits[3]) > limits[3] then
    return 'tokens_per_day', limits[3], (spent.day + 1) * DAY_MS - now
  end
  if limits[4] and taken(K.slots .. 'j:' .. subject, limits[4], now) >= limits[4] then
    return 'max_jobs', limits[4], 1000
  end
  if limits[5] and ARGV[28] == '1' and taken(K.slots .. 's:' .. subject, limits[5], now) >= limits[5] then
    return 'max_streams', limits[5], 1000
  end
end

-- {limit, left, ms until it is whole again} of the tighter bucket of the two subjects; {} if there is none.
local function standing(subjects, index, field, more)
  local found = {}
  for _, each in ipairs(subjects) do
    local limit = each.limits[index]
    if limit then
      local used = each.spent[field] + more
      local left = math.max(0, math.floor(limit - used))
      if not found[1] or left < found[2] then found = { limit, left, math.ceil(used / limit * 60000) } end
    end
  end
  return found
end

local function subjects_of(allowance, now)
  local subjects = {
    { kind = 'key', name = 'k:' .. allowance[1], limits = allowance[2] },
    { kind = 'owner', name = 'o:' .. owner, limits = allowance[3] },
  }
  for _, each in ipairs(subjects) do each.spent = spent_of(each.name, each.limits, now) end
  return subjects
end

local function reserve(subject, limits, spent, cost, now, ttl_ms)
  redis.call('HSET', K.spent .. subject, 'requests', exact(spent.requests + 1), 'tokens', exact(spent.tokens + cost),
    'at', text(now), 'day', text(spent.day), 'today', text(spent.today + cost))
  redis.call('PEXPIRE', K.spent .. subject, 2 * DAY_MS)
  for index, kind in ipairs({ 'j:', ARGV[28] == '1' and 's:' or nil }) do
    if limits[3 + index] then
      redis.call('ZADD', K.slots .. kind .. subject, now + ttl_ms, job)
      keep(K.slots .. kind .. subject, ttl_ms)
    end
  end
end

if redis.call('EXISTS', K.job .. job) == 1 then return { 'known', last_id(job) or '' } end
local now = clock()
if ARGV[29] ~= '' then
  local left_ms = redis.call('PTTL', K.poison .. ARGV[29])
  if left_ms > 0 then return { 'poisoned', left_ms } end
end
if not is_served(model, now) then return { 'no_capacity', why_unplaced(model) or '' } end
local cost, subjects = tonumber(ARGV[15]), {}
if ARGV[27] ~= '' then subjects = subjects_of(cmsgpack.unpack(ARGV[27]), now) end
for _, each in ipairs(subjects) do
  local name, limit, retry_ms = breach(each.name, each.limits, each.spent, cost, now)
  if name then
    return { 'limit', each.kind, name, limit, math.ceil(retry_ms), standing(subjects, 1, 'requests', 0),
      standing(subjects, 2, 'tokens', 0) }
  end
end
local waiting, own = waiting_of(''), waiting_of(':' .. owner)
if is_full(own, 21, 1) then return { 'owner_queue_full', own[1], retry_after_s(own[1], now) } end
if is_full(waiting, 18, band == 'batch' and tonumber(ARGV[17]) or 1) then
  local shed = band ~= 'batch' and to_shed(waiting)
  if not shed then return { 'queue_full', waiting[1], retry_after_s(waiting[1], now) } end
  for _, each in ipairs(shed) do
    finish_unrun(each, 'failed', 'queue_full', 'this batch request made room for one that is more urgent', now)
  end
  for _, each in ipairs(subjects) do each.spent = spent_of(each.name, each.limits, now) end
end

local ttl_ms, charge = tonumber(ARGV[10]), cost / ARGV[16]
for _, each in ipairs(subjects) do reserve(each.name, each.limits, each.spent, cost, now, ttl_ms) end
local tag = exact(start_tag(model, band, owner, charge, ttl_ms))
local more = {}
local function also(name, value) more[#more + 1], more[#more + 2] = name, value end
if ARGV[25] == '1' then also('is_kept', 1) end
if ARGV[26] ~= '' then also('prefix', ARGV[26]) end
if ARGV[29] ~= '' then also('digest', ARGV[29]) end
if subjects[1] then also('key', string.sub(subjects[1].name, 3)) end
redis.call('HSET', K.job .. job, 'spec', ARGV[2], 'view', ARGV[3], 'model', model, 'attempt', 0, 'deaths', 0,
  'tag', tag, 'grace_ms', grace_ms, 'log_ttl_ms', ARGV[11], 'ttl_ms', ttl_ms, 'max_deaths', ARGV[12],
  'enqueued_ms', text(now), 'age', serial(ttl_ms), 'band', band, 'owner', owner, 'bytes', bytes, 'tokens', tokens,
  'cost', ARGV[15], 'weight', ARGV[16], 'max_run_ms', ARGV[24], 'history', history(), unpack(more))
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
for _, key in ipairs({ K.deadlines, K.unread }) do keep_list(key, ttl_ms) end
enqueue(job, model, band, tag, ttl_ms)
redis.call('HINCRBY', K.arrived .. model, 'jobs', 1)
redis.call('HINCRBY', K.arrived .. model, 'tokens', tokens)
keep_list(K.arrived .. model, ttl_ms)
return { 'admitted', '0-1', now, standing(subjects, 1, 'requests', 1), standing(subjects, 2, 'tokens', cost) }
