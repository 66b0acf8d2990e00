#!lua flags=allow-oom
-- present: a replica or pod says that it is there and what it is; it is forgotten when it stops saying so.
-- Reads and writes: model, replicas, pods (zset), replica, pod, arrived (hash), idle (list).
-- ARGV: 1 'replicas' | 'pods' | 'cluster', 2 id, 3 model or '', 4 presence ms (0: it leaves), then field and value pairs
-- Safe to repeat.
local kind, id, model, presence_ms, now = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), clock()

local function enter(key)
  redis.call('ZREMRANGEBYSCORE', key, '-inf', text(now))
  redis.call('ZREM', key, id)
  if presence_ms > 0 then
    redis.call('ZADD', key, now + presence_ms, id)
    keep(key, presence_ms)
  end
end

if model ~= '' then
  enter(K.model .. model)
  -- who leaves must not take a wake-up that another could use; who stays idle for long must not be forgotten
  if presence_ms == 0 then redis.call('LREM', K.idle .. model, 0, id) else keep(K.idle .. model, IDLE_TTL_MS) end
end
if kind ~= 'cluster' then
  enter(K[kind])
  local about = (kind == 'pods' and K.pod or K.replica) .. id
  if presence_ms == 0 then
    redis.call('DEL', about)
  else
    if kind == 'replicas' and #ARGV > 4 and redis.call('EXISTS', about) == 0 then
      redis.call('HINCRBY', K.arrived .. model, 'starts', 1)
      keep(K.arrived .. model, IDLE_TTL_MS)
    end
    for i = 5, #ARGV, 2 do redis.call('HSET', about, ARGV[i], ARGV[i + 1]) end
    redis.call('PEXPIRE', about, presence_ms)
  end
end
return 'ok'
