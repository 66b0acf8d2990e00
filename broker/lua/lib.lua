-- Shared by all verbs; `scripts.py` puts it, after the table K of key names, between a script's first line and the rest.
-- KEYS[1] is the shard's prefix. Times are epoch milliseconds of this server; nobody sends a clock.

local TAG = { queued = 0, claimed = 1, started = 2, delta = 3, finished = 4, ended = 5 }
local BANDS = { 'resume', 'interactive', 'default', 'batch' }
local IDLE_TTL_MS = 3600000
local DAY_MS = 86400000
local USAGE_TTL_MS = 35 * DAY_MS
local DRAIN_MS = 30000 -- time constant of the measured drain rate
local ANCHOR = 8 -- bytes of one in a job's prefix
local MAX_HOLDERS, MAX_ANCHORS = 4, 200000

local function clock()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end

local function text(number)
  return string.format('%.0f', number)
end

-- Renew a key's TTL to at least `ttl_ms`; PEXPIRE ... GT would leave a key that has no TTL without one. `renewed_ms` is
-- what it gets then, if that is more.
local function keep(key, ttl_ms, renewed_ms)
  if redis.call('PTTL', key) < tonumber(ttl_ms) then redis.call('PEXPIRE', key, renewed_ms or ttl_ms) end
end

-- The same for a list that every job renews: it gets twice what it needs, so that most calls need not. Not for what a
-- promise says how long it is kept.
local function keep_list(key, ttl_ms)
  keep(key, ttl_ms, 2 * ttl_ms)
end

local function last_id(job)
  local found = redis.call('XREVRANGE', K.log .. job, '+', '-', 'COUNT', 1)
  return found[1] and found[1][1]
end

local function next_id(id)
  local attempt, n = string.match(id, '^(%d+)-(%d+)$')
  return attempt .. '-' .. text(n + 1)
end

local function pack_entry(now, enqueued, event)
  return cmsgpack.pack({ now - enqueued, { event } })
end

local function pods_of(job, now)
  local pods, all = {}, redis.call('HGETALL', K.readers .. job)
  for i = 1, #all, 2 do
    if tonumber(all[i + 1]) > now then pods[#pods + 1] = all[i] end
  end
  return pods
end

-- Append an entry and tell the pods that read the job: msgpack [[job, id, bin]], as workers send it. Returns the pods.
local function append(job, id, payload, now)
  redis.call('XADD', K.log .. job, id, 'e', payload)
  local message = '\145\147' .. cmsgpack.pack(job) .. cmsgpack.pack(id) .. '\198' .. struct.pack('>I4', #payload) .. payload
  local pods = pods_of(job, now)
  for _, pod in ipairs(pods) do redis.call('SPUBLISH', K.hints .. pod, message) end
  return pods
end

-- Numbers that grow, also over a loss of the counter or of its last values: none is below the clock's microseconds.
local function serial(ttl_ms)
  local t = redis.call('TIME')
  local n = math.max((redis.call('GET', K.counter) or 0) + 1, t[1] * 1000000 + t[2])
  redis.call('SET', K.counter, text(n), 'KEEPTTL')
  keep_list(K.counter, ttl_ms)
  return n
end

-- The history that this server writes: another one after each start and each promotion, also of a former primary.
local function history()
  return string.match(redis.call('INFO', 'replication'), 'master_replid:(%x%x%x%x%x%x%x%x)')
end

-- Begin a job's next attempt. No number may ever stand for two texts, and a server that was started again, or a replica
-- that was promoted, may have lost attempts that readers have seen. Its history tells; the number then jumps ahead of
-- all that could have been, by the job's age in milliseconds. What else is known of the attempt is set with it.
local function next_attempt(job, now, ...)
  local own = history()
  local f = redis.call('HMGET', K.job .. job, 'attempt', 'history', 'enqueued_ms')
  local attempt = f[1] + 1
  if f[2] ~= own then attempt = attempt + math.max(now - f[3], 1) end
  redis.call('HSET', K.job .. job, 'attempt', text(attempt), 'history', own, ...)
  return text(attempt)
end

-- The replica that runs the job learns at its next tick that something about it changed.
local function news(replica, job, ttl_ms)
  redis.call('ZADD', K.news .. replica, serial(ttl_ms), job)
  keep_list(K.news .. replica, ttl_ms)
end

local function is_served(model, now)
  return redis.call('ZCOUNT', K.model .. model, '(' .. text(now), '+inf') > 0
end

-- Why the cluster cannot place the model, false if it does not say so.
local function why_unplaced(model)
  return redis.call('GET', K.unplaced .. model)
end

-- Who has served the first bytes of a prompt: the anchors of its prefix, and for each a text of replicas, those that
-- served it last first, or false.
local function holders_of(model, prefix)
  local anchors = {}
  for i = 1, #prefix, ANCHOR do anchors[#anchors + 1] = string.sub(prefix, i, i + ANCHOR - 1) end
  return anchors, redis.call('HMGET', K.prefix .. model, unpack(anchors))
end

-- Wake one replica that waits for work, one that holds most of the prefix if there is such; one without a receiver is
-- gone, so the next is tried.
local function wake(model, prefix)
  if prefix and redis.call('EXISTS', K.prefix .. model) == 1 and redis.call('EXISTS', K.idle .. model) == 1 then
    local anchors, holders = holders_of(model, prefix)
    for i = #anchors, 1, -1 do
      for replica in string.gmatch(holders[i] or '', '%S+') do
        local is_idle = redis.call('LREM', K.idle .. model, 0, replica) > 0
        if is_idle and redis.call('SPUBLISH', K.wake .. replica, model) > 0 then return end
      end
    end
  end
  while true do
    local replica = redis.call('LPOP', K.idle .. model)
    if not replica or redis.call('SPUBLISH', K.wake .. replica, model) > 0 then return end
  end
end

-- A double as text that reads back as the same double.
local function exact(number)
  return string.format('%.17g', number)
end

-- A waiting job stands in its queue as its age and its id, so that equal start tags are in order of age.
local function member_of(age, job)
  return string.format('%016.0f', age) .. job
end

local function job_of(member)
  return string.sub(member, -32)
end

-- Count a job in or out of what waits: of its model, and of its owner, who is forgotten with the last one.
local function count(model, owner, jobs, bytes, tokens)
  local key, jobs_, bytes_, tokens_ = K.load .. model, 'jobs:' .. owner, 'bytes:' .. owner, 'tokens:' .. owner
  local f = redis.call('HMGET', key, 'jobs', 'bytes', 'tokens', jobs_, bytes_, tokens_)
  local left = (f[4] or 0) + jobs
  redis.call('HSET', key, 'jobs', text((f[1] or 0) + jobs), 'bytes', text((f[2] or 0) + jobs * bytes),
    'tokens', text((f[3] or 0) + jobs * tokens), jobs_, text(left), bytes_, text((f[5] or 0) + jobs * bytes),
    tokens_, text((f[6] or 0) + jobs * tokens))
  if left <= 0 then redis.call('HDEL', key, jobs_, bytes_, tokens_) end
  return left
end

local function is_anything_waiting(model)
  for _, band in ipairs(BANDS) do
    if redis.call('EXISTS', K.queue .. model .. ':' .. band) == 1 then return true end
  end
  return false
end

-- The only way into a queue.
local function enqueue(job, model, band, tag, ttl_ms)
  local f = redis.call('HMGET', K.job .. job, 'age', 'owner', 'bytes', 'tokens', 'enqueued_ms', 'prefix')
  local queue, ages, member = K.queue .. model .. ':' .. band, K.ages .. model .. ':' .. band, member_of(f[1], job)
  redis.call('ZADD', queue, tag, member)
  redis.call('ZADD', ages, f[5], member)
  redis.call('HSET', K.job .. job, 'place', band)
  count(model, f[2], 1, f[3], f[4])
  redis.call('SADD', K.models, model)
  for _, key in ipairs({ queue, ages, K.load .. model, K.models }) do keep_list(key, ttl_ms) end
  wake(model, f[6])
end

-- The only way out of a queue. What is remembered of it goes when it is empty, so that no error outlives a quiet moment:
-- a job that expired while it waited does not say any more what it was counted as.
local function dequeue(model, band, member)
  local queue, fair, job = K.queue .. model .. ':' .. band, K.fair .. model .. ':' .. band, job_of(member)
  if redis.call('ZREM', queue, member) == 0 then return end
  redis.call('ZREM', K.ages .. model .. ':' .. band, member)
  local f = redis.call('HMGET', K.job .. job, 'owner', 'bytes', 'tokens')
  redis.call('HDEL', K.job .. job, 'place')
  if f[1] and count(model, f[1], -1, f[2], f[3]) <= 0 then redis.call('HDEL', fair, 's:' .. f[1]) end
  if redis.call('EXISTS', queue) == 1 then return end
  redis.call('DEL', fair)
  if not is_anything_waiting(model) then redis.call('DEL', K.load .. model) end
end

-- Start-time fair queueing inside a band (Goyal, Vin, Cheng, 1996): a job starts where the one before it of its owner ends,
-- or at the virtual time, which is the start of the job claimed last; it ends its charge (cost / weight) later. It never
-- starts before a job of its owner that waits: corrections may have moved the owner's end before that.
local function start_tag(model, band, owner, charge, ttl_ms)
  local fair = K.fair .. model .. ':' .. band
  local f = redis.call('HMGET', fair, 'v', 'f:' .. owner, 's:' .. owner)
  local start = math.max(tonumber(f[1] or 0), tonumber(f[2] or 0), tonumber(f[3] or 0))
  redis.call('HSET', fair, 'f:' .. owner, exact(start + charge), 's:' .. owner, exact(start))
  keep_list(fair, ttl_ms)
  return start
end

local function advance(model, band, start)
  local fair = K.fair .. model .. ':' .. band
  if redis.call('EXISTS', fair) == 0 then return end
  redis.call('HSET', fair, 'v', exact(math.max(tonumber(redis.call('HGET', fair, 'v') or 0), start)))
end

-- Charge an owner for what a job took and not for what it was thought to take: nothing, if it was never claimed.
local function correct(model, band, owner, charge)
  local fair = K.fair .. model .. ':' .. band
  local f = redis.call('HMGET', fair, 'v', 'f:' .. owner)
  if f[2] then redis.call('HSET', fair, 'f:' .. owner, exact(math.max(tonumber(f[1] or 0), f[2] + charge))) end
end

-- How many jobs were claimed, older ones weighing less: DRAIN_MS ago counts 1 / e. nil if none was for a long time.
local function drained(model, now)
  local f = redis.call('HMGET', K.drain .. model, 'count', 'at_ms')
  return f[1] and f[1] * math.exp((f[2] - now) / DRAIN_MS)
end

local function note_drain(model, jobs, now)
  if jobs == 0 then return end
  redis.call('HSET', K.drain .. model, 'count', exact((drained(model, now) or 0) + jobs), 'at_ms', text(now))
  redis.call('PEXPIRE', K.drain .. model, 10 * DRAIN_MS)
end

local function drop_lease(job, worker)
  redis.call('ZREM', K.leases, job)
  if worker then redis.call('SREM', K.held .. worker, job) end
end

-- What a job has used counts for its model and its owner, by the day on which it ended.
local function note_usage(model, owner, prompt, completion, now)
  local key, of = K.usage .. text(math.floor(now / DAY_MS)), '\t' .. model .. '\t' .. owner
  redis.call('HINCRBY', key, 'requests' .. of, 1)
  if prompt > 0 then redis.call('HINCRBY', key, 'prompt_tokens' .. of, prompt) end
  if completion > 0 then redis.call('HINCRBY', key, 'completion_tokens' .. of, completion) end
  keep(key, USAGE_TTL_MS)
end

-- Give back what `admit` has reserved for a job of a key with limits, and charge what it has used in place of its cost.
local function give_back(job, key, owner, over, enqueued, now)
  for _, subject in ipairs({ 'k:' .. key, 'o:' .. owner }) do
    redis.call('ZREM', K.slots .. 'j:' .. subject, job)
    redis.call('ZREM', K.slots .. 's:' .. subject, job)
    local f = redis.call('HMGET', K.spent .. subject, 'tokens', 'day', 'today')
    if f[1] then
      redis.call('HSET', K.spent .. subject, 'tokens', exact(math.max(0, f[1] + over)))
      if tonumber(f[2]) == math.floor(enqueued / DAY_MS) then
        redis.call('HSET', K.spent .. subject, 'today', text(math.max(0, f[3] + over)))
      end
    end
  end
end

-- End a job, wherever it is: one terminal entry, and nothing of it is left in any list. `usage` is what it has used, in
-- tokens of its prompt and of its answer.
local function finish(job, id, payload, status, usage, now)
  local f = redis.call('HMGET', K.job .. job, 'model', 'place', 'worker', 'log_ttl_ms', 'age', 'owner', 'cost', 'weight',
    'is_kept', 'key', 'enqueued_ms')
  append(job, id, payload, now)
  drop_lease(job, f[3])
  if f[2] then
    dequeue(f[1], f[2], member_of(f[5], job))
    correct(f[1], f[2], f[6], -f[7] / f[8])
  end
  note_usage(f[1], f[6], usage[1], usage[2], now)
  if f[10] then give_back(job, f[10], f[6], usage[1] + usage[2] - f[7], f[11], now) end
  redis.call('ZREM', K.unread, job)
  redis.call('ZREM', K.deadlines, job)
  redis.call('ZREM', K.overrun, job)
  local gone = { 'place', 'worker', 'cancel' }
  if not f[9] then gone[4] = 'spec' end
  redis.call('HDEL', K.job .. job, unpack(gone))
  redis.call('HSET', K.job .. job, 'ended', status)
  for _, kind in ipairs({ K.job, K.log, K.readers }) do redis.call('PEXPIRE', kind .. job, f[4]) end
end

-- The usage, as its worker packed it, of a job all of whose choices are finished; else nil. It stands beside the entry that
-- finished the last of them: the last one, or the one before the claims that came after it, which have kept it.
local function finished_usage(job)
  local row = redis.call('XREVRANGE', K.log .. job, '+', '-', 'COUNT', 1)[1]
  return row and row[2][3] == 'u' and row[2][4] or redis.call('HGET', K.job .. job, 'usage')
end

-- What a job has used that ends without a worker, as far as the log tells without reading it: one token a step.
local function usage_so_far(job, attempt)
  if attempt == '0' then return { 0, 0 } end
  return { tonumber(redis.call('HGET', K.job .. job, 'tokens')), math.max(0, redis.call('XLEN', K.log .. job) - 3) }
end

-- End a job that no worker runs: the new attempt fences whoever ran it before. A job whose readers have seen it finish
-- ends as `done`, whatever was to be its end; answers whether it ended as it was told.
local function finish_unrun(job, status, code, message, now)
  local f = redis.call('HMGET', K.job .. job, 'enqueued_ms', 'ended', 'attempt')
  if not f[1] or f[2] then return false end
  local usage = f[3] ~= '0' and finished_usage(job)
  local id = next_attempt(job, now) .. '-0'
  if usage then
    -- by hand, since cmsgpack leaves no hole in an array: [at, [[ended, 'done', nil, usage]]]
    local ended = '\148' .. cmsgpack.pack(TAG.ended) .. cmsgpack.pack('done') .. '\192' .. usage
    finish(job, id, '\146' .. cmsgpack.pack(now - f[1]) .. '\145' .. ended, 'done', cmsgpack.unpack(usage), now)
    return false
  end
  local failure = message and { code, message } or { code }
  local ended = pack_entry(now, tonumber(f[1]), { TAG.ended, status, failure })
  finish(job, id, ended, status, usage_so_far(job, f[3]), now)
  return true
end

-- End a job that was marked, or is to be, and that no worker runs.
local function finish_marked(job, cause, now)
  if cause == 'max_run' then
    finish_unrun(job, 'failed', 'run_timeout', false, now)
  else
    finish_unrun(job, 'cancelled', 'cancelled', false, now)
  end
end

local POISON_MS = 3600000 -- for so long the same request of the same owner is refused

-- End a job that has lost too many workers, and keep it whole among the dead letters: `how` it lost the last one.
local function bury(job, worker, how, now, dead_ttl_ms)
  local f = redis.call('HMGET', K.job .. job, 'spec', 'log_ttl_ms', 'digest')
  if not finish_unrun(job, 'failed', 'too_many_deaths', false, now) then return end
  if f[3] then redis.call('SET', K.poison .. f[3], 1, 'PX', POISON_MS) end
  redis.call('HSET', K.job .. job, 'spec', f[1], 'died_of', how, 'died_with', worker or '')
  for _, kind in ipairs({ K.job, K.log, K.readers }) do keep(kind .. job, dead_ttl_ms) end
  redis.call('ZREMRANGEBYSCORE', K.dead, '-inf', text(now - dead_ttl_ms))
  redis.call('ZADD', K.dead, now, job)
  keep(K.dead, math.max(dead_ttl_ms, f[2]))
end

-- Waiting: end it. Running: mark it, the worker learns at its next tick. Ended or unknown: nothing. Returns what it was.
local function cancel(job, cause, now)
  local f = redis.call('HMGET', K.job .. job, 'ended', 'worker', 'ttl_ms', 'cancel', 'enqueued_ms')
  if not f[5] then return 'unknown' end
  if f[1] then return 'ended' end
  if not f[2] then
    finish_marked(job, cause, now)
    return 'waiting'
  end
  if not f[4] then
    redis.call('HSET', K.job .. job, 'cancel', cause)
    news(f[2], job, f[3])
  end
  return 'running'
end

-- Put a running job back to the front, or end it if it was cancelled or has killed too many workers. `death` says how it
-- lost this one, if that counts.
local function hand_back(job, death, now, dead_ttl_ms)
  local f = redis.call('HMGET', K.job .. job, 'model', 'worker', 'cancel', 'tag', 'ttl_ms', 'max_deaths', 'deaths')
  drop_lease(job, f[2])
  redis.call('HDEL', K.job .. job, 'worker')
  if f[2] then news(f[2], job, f[5]) end
  local deaths = tonumber(f[7])
  if death then deaths = redis.call('HINCRBY', K.job .. job, 'deaths', 1) end
  if f[3] then
    finish_marked(job, f[3], now)
  elseif deaths >= tonumber(f[6]) then
    bury(job, f[2], death, now, dead_ttl_ms)
  else
    enqueue(job, f[1], 'resume', f[4], f[5])
  end
end

-- Is the log still the caller's, and is `id` its last entry? 'ok', 'repeat' (this settle was done), 'stale' or 'gone'.
local function check_writer(job, attempt, id)
  local f = redis.call('HMGET', K.job .. job, 'attempt', 'ended')
  if not f[1] then return 'gone' end
  if f[1] ~= attempt then return 'stale' end
  local last = last_id(job)
  if f[2] then return last == next_id(id) and 'repeat' or 'stale' end
  return last == id and 'ok' or 'behind'
end
