#!lua flags=allow-oom
-- release: give a running job back to the front of the queue, with its old start tag.
-- Reads and writes: job, load (hash), log (stream), leases, queue, ages (zset), held (set), news, dead (zset).
-- ARGV: 1 replica, 2 job, 3 attempt or '' (a claim whose reply was lost), 4 id of the caller's last entry or '',
--       5 '1' if the engine hung on it, 6 dead letter TTL ms
-- Returns as `settle` does. Safe to repeat: a job that the replica does not hold is left alone.
local replica, job = ARGV[1], ARGV[2]
local worker = redis.call('HGET', K.job .. job, 'worker')
if worker ~= replica then
  redis.call('SREM', K.held .. replica, job)
  return worker and 'stale' or 'gone'
end
if ARGV[3] ~= '' then
  local check = check_writer(job, ARGV[3], ARGV[4])
  if check ~= 'ok' then return check end
end
hand_back(job, ARGV[5] == '1' and 'engine_hung', clock(), tonumber(ARGV[6]))
return 'ok'
