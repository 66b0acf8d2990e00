#!lua flags=allow-oom
-- stats: the numbers of one model that gauges and the autoscaler read.
-- Reads: queue (zset), job (hash), model (zset), replicas, held (set). Writes nothing.
-- ARGV: 1 model
-- Returns {{waiting per band, in claim order}, age of the oldest in ms, running jobs}.
local model, now, waiting, oldest, running = ARGV[1], clock(), {}, 0, 0
for i, band in ipairs(BANDS) do
  local queue = K.queue .. model .. ':' .. band
  waiting[i] = redis.call('ZCARD', queue)
  local first = redis.call('ZRANGE', queue, 0, 0)[1]
  local enqueued = first and redis.call('HGET', K.job .. first, 'enqueued_ms')
  if enqueued then oldest = math.max(oldest, now - enqueued) end
end
for _, replica in ipairs(redis.call('ZRANGE', K.model .. model, 0, -1)) do
  running = running + redis.call('SCARD', K.held .. replica)
end
return { waiting, oldest, running }
