-- Shared by all verbs; `scripts.py` puts it, after the table K of key names, between a script's first line and the rest.
-- KEYS[1] is the shard's prefix. Times are epoch milliseconds of this server; nobody sends a clock.

local TAG = { queued = 0, claimed = 1, started = 2, delta = 3, finished = 4, ended = 5 }
local BANDS = { 'resume', 'interactive', 'default', 'batch' }
local IDLE_TTL_MS = 3600000

local function clock()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end

local function text(number)
  return string.format('%.0f', number)
end

-- Renew a shared key's TTL to at least `ttl_ms`; PEXPIRE ... GT would leave a key that has no TTL without one.
local function keep(key, ttl_ms)
  if redis.call('PTTL', key) < tonumber(ttl_ms) then redis.call('PEXPIRE', key, ttl_ms) end
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

-- Tell the pods that read `job` of an entry that this script has appended: msgpack [[job, id, bin]], as workers send it.
local function hint(job, id, payload, now)
  local message = '\145\147' .. cmsgpack.pack(job) .. cmsgpack.pack(id) .. '\198' .. struct.pack('>I4', #payload) .. payload
  for _, pod in ipairs(pods_of(job, now)) do redis.call('SPUBLISH', K.hints .. pod, message) end
end

local function append(job, id, payload, now)
  redis.call('XADD', K.log .. job, id, 'e', payload)
  hint(job, id, payload, now)
end

-- Numbers that grow, also over a loss of the counter or of its last values: none is below the clock's microseconds.
local function serial(ttl_ms)
  local t = redis.call('TIME')
  local n = math.max((redis.call('GET', K.counter) or 0) + 1, t[1] * 1000000 + t[2])
  redis.call('SET', K.counter, text(n), 'KEEPTTL')
  keep(K.counter, ttl_ms)
  return n
end

-- The history that this server writes: another one after each start and each promotion, also of a former primary.
local function history()
  return string.match(redis.call('INFO', 'replication'), 'master_replid:(%x%x%x%x%x%x%x%x)')
end

-- Begin a job's next attempt. No number may ever stand for two texts, and a server that was started again, or a replica
-- that was promoted, may have lost attempts that readers have seen. Its history tells; the number then jumps ahead of
-- all that could have been, by the job's age in milliseconds.
local function next_attempt(job, now)
  local own = history()
  local f = redis.call('HMGET', K.job .. job, 'attempt', 'history', 'enqueued_ms')
  local attempt = f[1] + 1
  if f[2] ~= own then attempt = attempt + math.max(now - f[3], 1) end
  redis.call('HSET', K.job .. job, 'attempt', text(attempt), 'history', own)
  return text(attempt)
end

-- The replica that runs the job learns at its next tick that something about it changed.
local function news(replica, job, ttl_ms)
  redis.call('ZADD', K.news .. replica, serial(ttl_ms), job)
  keep(K.news .. replica, ttl_ms)
end

local function is_served(model, now)
  return redis.call('ZCOUNT', K.model .. model, '(' .. text(now), '+inf') > 0
end

-- Wake one replica that waits for work; one without a receiver is gone, so the next is tried.
local function wake(model)
  while true do
    local replica = redis.call('LPOP', K.idle .. model)
    if not replica or redis.call('SPUBLISH', K.wake .. replica, model) > 0 then return end
  end
end

local function enqueue(job, model, band, tag, ttl_ms)
  redis.call('ZADD', K.queue .. model .. ':' .. band, tag, job)
  keep(K.queue .. model .. ':' .. band, ttl_ms)
  redis.call('HSET', K.job .. job, 'place', band)
  local is_new = redis.call('HEXISTS', K.job .. job, 'history') == 0
  if is_new then redis.call('HSET', K.job .. job, 'history', history()) end
  redis.call('SADD', K.models, model)
  keep(K.models, ttl_ms)
  wake(model)
end

local function drop_lease(job, worker)
  redis.call('ZREM', K.leases, job)
  if worker then redis.call('SREM', K.held .. worker, job) end
end

-- End a job, wherever it is: one terminal entry, and nothing of it is left in any list.
local function finish(job, id, payload, status, now)
  local f = redis.call('HMGET', K.job .. job, 'model', 'place', 'worker', 'log_ttl_ms')
  append(job, id, payload, now)
  drop_lease(job, f[3])
  if f[2] then redis.call('ZREM', K.queue .. f[1] .. ':' .. f[2], job) end
  redis.call('ZREM', K.unread, job)
  redis.call('ZREM', K.deadlines, job)
  redis.call('HDEL', K.job .. job, 'spec', 'place', 'worker', 'cancel')
  redis.call('HSET', K.job .. job, 'ended', status)
  for _, kind in ipairs({ K.job, K.log, K.readers }) do redis.call('PEXPIRE', kind .. job, f[4]) end
end

-- End a job that no worker runs: the new attempt fences whoever ran it before.
local function finish_unrun(job, status, code, message, now)
  local f = redis.call('HMGET', K.job .. job, 'enqueued_ms', 'ended')
  if not f[1] or f[2] then return end
  local id = next_attempt(job, now) .. '-0'
  local failure = message and { code, message } or { code }
  finish(job, id, pack_entry(now, tonumber(f[1]), { TAG.ended, status, failure }), status, now)
end

-- Waiting: end it. Running: mark it, the worker learns at its next tick. Ended or unknown: nothing. Returns what it was.
local function cancel(job, cause, now)
  local f = redis.call('HMGET', K.job .. job, 'ended', 'worker', 'ttl_ms', 'cancel', 'enqueued_ms')
  if not f[5] then return 'unknown' end
  if f[1] then return 'ended' end
  if not f[2] then
    finish_unrun(job, 'cancelled', 'cancelled', false, now)
    return 'waiting'
  end
  if not f[4] then
    redis.call('HSET', K.job .. job, 'cancel', cause)
    news(f[2], job, f[3])
  end
  return 'running'
end

-- Put a running job back to the front, or end it if it was cancelled or has killed too many workers.
local function hand_back(job, is_death, now)
  local f = redis.call('HMGET', K.job .. job, 'model', 'worker', 'cancel', 'tag', 'ttl_ms', 'max_deaths', 'deaths')
  drop_lease(job, f[2])
  redis.call('HDEL', K.job .. job, 'worker')
  if f[2] then news(f[2], job, f[5]) end
  local deaths = tonumber(f[7])
  if is_death then deaths = redis.call('HINCRBY', K.job .. job, 'deaths', 1) end
  if f[3] then
    finish_unrun(job, 'cancelled', 'cancelled', false, now)
  elseif deaths >= tonumber(f[6]) then
    finish_unrun(job, 'failed', 'too_many_deaths', false, now)
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
