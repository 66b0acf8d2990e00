#!lua flags=allow-oom
-- stats: the numbers of one model that gauges and the autoscaler read.
-- Reads: queue, ages (zset), load, arrived (hash), model (zset), replicas, held (set), unplaced (string). Writes nothing.
-- ARGV: 1 model
-- Returns {{waiting per band, in claim order}, age of the oldest in ms, running jobs, prompt tokens that wait,
--          jobs ever admitted, prompt tokens of these, replicas that have come, why it cannot be placed or ''}.
local model, now, waiting, oldest, running = ARGV[1], clock(), {}, 0, 0
for i, band in ipairs(BANDS) do
  waiting[i] = redis.call('ZCARD', K.queue .. model .. ':' .. band)
  local first = redis.call('ZRANGE', K.ages .. model .. ':' .. band, 0, 0, 'WITHSCORES')
  if first[2] then oldest = math.max(oldest, now - first[2]) end
end
for _, replica in ipairs(redis.call('ZRANGE', K.model .. model, 0, -1)) do
  running = running + redis.call('SCARD', K.held .. replica)
end
local arrived = redis.call('HMGET', K.arrived .. model, 'jobs', 'tokens', 'starts')
return {
  waiting, oldest, running, tonumber(redis.call('HGET', K.load .. model, 'tokens') or 0),
  tonumber(arrived[1] or 0), tonumber(arrived[2] or 0), tonumber(arrived[3] or 0), why_unplaced(model) or ''
}
