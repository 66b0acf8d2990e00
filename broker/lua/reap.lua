#!lua flags=allow-oom
-- reap: act on every time that has run out: leases, reading leases, queue deadlines, wall times, models nobody serves.
-- Reads and writes: leases, unread, deadlines, overrun, dead, queue, ages (zset), load, fair, job, reaped (hash),
-- models (set), model (zset), log (stream). Reads unplaced (string).
-- ARGV: 1 how many of each at most, 2 dead letter TTL ms, 3 lease ms, 4 TTL ms of what is kept
-- Returns {leases taken back, cancelled unread, timed out, without capacity, run for too long}. Safe to repeat, by anybody,
-- at any time.
local limit, now, counts = ARGV[1], clock(), { 0, 0, 0, 0, 0 }

-- Nobody reaped for most of a lease: then nobody could renew either, be it that this server was away, took no writes, or is
-- a replica that was promoted, or that all others stood still. What ran out meanwhile has a lease time to be renewed in. The
-- first reap after that acts, however late it comes.
local function is_held()
  local f = redis.call('HMGET', K.reaped, 'at', 'held')
  redis.call('HSET', K.reaped, 'at', text(now))
  keep(K.reaped, ARGV[4])
  if f[2] then
    if now < tonumber(f[2]) then return true end
    redis.call('HDEL', K.reaped, 'held')
  elseif f[1] and now - f[1] > ARGV[3] * 2 / 3 then
    redis.call('HSET', K.reaped, 'held', text(now + ARGV[3]))
    return true
  end
  return false
end

local function overdue(key)
  return redis.call('ZRANGEBYSCORE', key, '-inf', text(now), 'LIMIT', 0, limit)
end

local held = is_held()
for _, job in ipairs(held and {} or overdue(K.leases)) do
  redis.call('ZREM', K.leases, job)
  local attempt = redis.call('HGET', K.job .. job, 'attempt')
  if attempt then
    -- a death counts only if the engine had begun: anything after this attempt's Claimed says so
    local begun = #redis.call('XRANGE', K.log .. job, attempt .. '-1', attempt .. '-1') > 0
    hand_back(job, begun and 'worker_lost', now, tonumber(ARGV[2]))
    counts[1] = counts[1] + 1
  end
end
for _, job in ipairs(held and {} or overdue(K.unread)) do
  redis.call('ZREM', K.unread, job)
  cancel(job, 'unread', now)
  counts[2] = counts[2] + 1
end
for _, job in ipairs(overdue(K.deadlines)) do
  redis.call('ZREM', K.deadlines, job)
  finish_unrun(job, 'failed', 'timeout', false, now)
  counts[3] = counts[3] + 1
end
for _, job in ipairs(overdue(K.overrun)) do
  redis.call('ZREM', K.overrun, job)
  cancel(job, 'max_run', now)
  counts[5] = counts[5] + 1
end
for _, model in ipairs(redis.call('SMEMBERS', K.models)) do
  local waiting = 0
  for _, band in ipairs(BANDS) do
    local queue = K.queue .. model .. ':' .. band
    if not held and not is_served(model, now) then
      for _, member in ipairs(redis.call('ZRANGE', queue, 0, limit - 1)) do
        finish_unrun(job_of(member), 'failed', 'no_capacity', why_unplaced(model), now)
        dequeue(model, band, member) -- it is there still if its job had expired
        counts[4] = counts[4] + 1
      end
    end
    waiting = waiting + redis.call('ZCARD', queue)
  end
  if waiting == 0 then redis.call('SREM', K.models, model) end
end
return counts
