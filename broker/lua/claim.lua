#!lua
-- claim: take the best jobs of some models, open an attempt of each in its log, and lease them to a replica.
-- Reads and writes: queue, ages (zset), load, fair, drain, prefix, job (hash), log (stream), leases, deadlines,
-- overrun (zset), held (set), idle (list). Reads replica (hash).
-- ARGV: 1 replica, 2 how many, 3 lease ms, 4 prompt tokens that are enough, or '', 5 prompt bytes that a replica prefills
--       in a second, 0 if that is not known, 6 anchors that the replica holds no more, 7 and on: models, best first
-- Returns {ms until a job that is left to another replica may be taken or -1, 1 if the replica is idle else 0, list of
-- {job, spec, attempt, id it continues from, waited ms, readers, prefix, prompt tokens to prefill}}. A replica that could
-- take more is entered as idle in the same step, so that no wake-up is lost. A lost reply is mended by `tick`.
-- Among the first jobs of equal rank it is given the one whose prefix it holds: `affinity.py` is the same rule.
local replica, wanted, enough, bytes_per_s = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[4]), tonumber(ARGV[5])
local now, claims, tokens, again = clock(), {}, 0, -1
local WINDOW, MAX_PASSED, MAX_LEFT_MS, TOKENS_PER_BYTE = 8, 8, 2000, 0.3
local PREFIX_TTL_MS = 3600000

local function is_enough()
  return #claims >= wanted or (enough and tokens >= enough)
end

local function open(job, model, here)
  local f = redis.call('HMGET', K.job .. job, 'spec', 'enqueued_ms', 'ttl_ms', 'tokens', 'prefix', 'attempt', 'max_run_ms')
  local after = f[1] and last_id(job)
  if not after then return end -- it expired while it waited
  local usage = f[6] ~= '0' and finished_usage(job)
  if usage then redis.call('HSET', K.job .. job, 'usage', usage) end
  local attempt = next_attempt(job, now, 'worker', replica)
  local pods = append(job, attempt .. '-0', pack_entry(now, tonumber(f[2]), { TAG.claimed, replica, after }), now)
  redis.call('ZADD', K.leases, now + ARGV[3], job)
  redis.call('SADD', K.held .. replica, job)
  redis.call('ZREM', K.deadlines, job)
  keep_list(K.leases, f[3])
  keep_list(K.held .. replica, f[3])
  if f[7] then -- else an older build has admitted it. The first claim starts its wall time, which goes on over all attempts
    redis.call('ZADD', K.overrun, 'NX', now + f[7], job)
    keep_list(K.overrun, f[3])
  end
  local fresh = math.max(f[4] - math.floor(here * TOKENS_PER_BYTE), 1)
  tokens = tokens + fresh
  claims[#claims + 1] = { job, f[1], attempt, after, now - f[2], pods, f[5] or '', fresh }
end

-- -- prefixes --------------------------------------------------------------------------------------------------------

local presence = { [replica] = false } -- is that other replica there?

local function is_there(other)
  if presence[other] == nil then presence[other] = redis.call('EXISTS', K.replica .. other) == 1 end
  return presence[other]
end

local lengths = { 1024 } -- bytes of the prompt up to each anchor
for i = 2, 11 do lengths[i] = 2 * lengths[i - 1] end

-- How many bytes of a prompt this replica holds, and any other one that is there.
local function here_and_there(model, prefix)
  local here, there = 0, 0
  local anchors, holders = holders_of(model, prefix)
  for i = #anchors, 1, -1 do
    for other in string.gmatch(holders[i] or '', '%S+') do
      if other == replica then here = math.max(here, lengths[i]) end
      if there == 0 and is_there(other) then there = lengths[i] end
    end
    if here > 0 and there > 0 then break end
  end
  return here, there
end

-- This replica has served a prompt, and is the last that has.
local function hold(model, prefix)
  local anchors, holders = holders_of(model, prefix)
  local pairs_ = {}
  for i, anchor in ipairs(anchors) do
    local kept, count = replica, 1
    for other in string.gmatch(holders[i] or '', '%S+') do
      if other ~= replica and count < MAX_HOLDERS then kept, count = kept .. ' ' .. other, count + 1 end
    end
    pairs_[2 * i - 1], pairs_[2 * i] = anchor, kept
  end
  local key = K.prefix .. model
  redis.call('HSET', key, unpack(pairs_))
  redis.call('PEXPIRE', key, PREFIX_TTL_MS)
  if redis.call('HLEN', key) > MAX_ANCHORS then redis.call('HDEL', key, unpack(redis.call('HRANDFIELD', key, 32))) end
end

local function drop(model, dropped)
  local anchors, holders = holders_of(model, dropped)
  for i, anchor in ipairs(anchors) do
    local kept, had = {}, false
    for other in string.gmatch(holders[i] or '', '%S+') do
      if other == replica then had = true else kept[#kept + 1] = other end
    end
    if had and #kept == 0 then redis.call('HDEL', K.prefix .. model, anchor) end
    if had and #kept > 0 then redis.call('HSET', K.prefix .. model, anchor, table.concat(kept, ' ')) end
  end
end

-- -- who is next -----------------------------------------------------------------------------------------------------

local known = {}

-- A waiting job as the rule sees it; read once, however many are claimed.
local function candidate(model, member, tag)
  local c = known[member]
  if not c then
    local f = redis.call('HMGET', K.job .. job_of(member), 'owner', 'cost', 'weight', 'passed', 'prefix', 'enqueued_ms')
    c = { member = member, owner = f[1], charge = f[1] and f[2] / f[3] or 0, passed = tonumber(f[4] or 0), prefix = f[5] }
    c.model = model
    c.here, c.there, c.waited = 0, 0, f[1] and now - f[6] or 0
    if f[5] then c.here, c.there = here_and_there(model, f[5]) end
    known[member] = c
  end
  c.score, c.tag = tag, tonumber(tag)
  return c
end

local function first_of(model, band)
  local is_plain = band == 'resume' or redis.call('EXISTS', K.prefix .. model) == 0
  local rows = redis.call('ZRANGE', K.queue .. model .. ':' .. band, 0, is_plain and 0 or WINDOW - 1, 'WITHSCORES')
  local window = {}
  for i = 1, #rows, 2 do window[#window + 1] = candidate(model, rows[i], rows[i + 1]) end
  return window
end

-- What is known of waiting jobs once this replica has got one with this prefix.
local function learn(model, prefix)
  for _, c in pairs(known) do
    local same = 0
    while c.model == model and c.prefix and same < #prefix
      and string.sub(prefix, same + 1, same + ANCHOR) == string.sub(c.prefix, same + 1, same + ANCHOR) do
      same = same + ANCHOR
    end
    if same > 0 then c.here = math.max(c.here, lengths[same / ANCHOR]) end
  end
end

local function gain(c)
  return 2 * c.here - math.max(c.here, c.there)
end

-- How long this job is still left to the replica that holds more of it: at most as long as that saves.
local function left_ms(c)
  if bytes_per_s == 0 or c.passed >= MAX_PASSED or gain(c) >= 0 then return 0 end
  return math.max(0, math.min(MAX_LEFT_MS, math.floor((c.there - c.here) * 1000 / bytes_per_s)) - c.waited)
end

local function choose(window)
  local firsts, best = {}, nil
  for i, c in ipairs(window) do
    firsts[c.owner] = firsts[c.owner] or c.tag
    local left = left_ms(c)
    if left > 0 then
      if again < 0 or left < again then again = left end
    elseif firsts[c.owner] - window[1].tag <= window[1].charge and (not best or gain(c) > gain(window[best])) then
      best = i
    end
    if c.passed >= MAX_PASSED then break end
  end
  return best
end

-- The chosen one has the turn of its owner's first, and each of that owner's that it overtakes the turn of the next.
local function overtake(queue, window, chosen)
  local free, last = window[chosen].score, window[chosen]
  for i = chosen - 1, 1, -1 do
    local c = window[i]
    c.passed = redis.call('HINCRBY', K.job .. job_of(c.member), 'passed', 1)
    if c.owner == last.owner then
      local own = c.score
      redis.call('ZADD', queue, 'XX', free, c.member)
      redis.call('HSET', K.job .. job_of(c.member), 'tag', free)
      free = own
    end
  end
  last.tag = tonumber(free)
  redis.call('HSET', K.job .. job_of(last.member), 'tag', free)
end

local function take(model, band)
  local window = first_of(model, band)
  local chosen = choose(window)
  if not chosen then return false end
  local c, queue = window[chosen], K.queue .. model .. ':' .. band
  if chosen > 1 and c.owner then overtake(queue, window, chosen) end
  dequeue(model, band, c.member)
  advance(model, band, c.tag)
  open(job_of(c.member), model, c.here)
  if c.prefix then
    hold(model, c.prefix)
    learn(model, c.prefix)
  end
  return true
end

if ARGV[6] ~= '' then
  for i = 7, #ARGV do drop(ARGV[i], ARGV[6]) end
end
for _, band in ipairs(BANDS) do
  for i = 7, #ARGV do
    local before = #claims
    while not is_enough() and take(ARGV[i], band) do end
    note_drain(ARGV[i], #claims - before, now)
  end
end
for i = 7, #ARGV do
  local idle = K.idle .. ARGV[i]
  redis.call('LREM', idle, 0, replica)
  if not is_enough() then
    redis.call('RPUSH', idle, replica)
    keep(idle, IDLE_TTL_MS)
  end
end
return { again, is_enough() and 0 or 1, claims }
