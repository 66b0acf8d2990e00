#!lua flags=allow-oom
-- settle: append the terminal entry of a job and free everything it holds.
-- Reads and writes: job, readers, load, fair (hash), log (stream), leases, unread, deadlines, queue, ages (zset),
-- held (set), usage, spent (hash), slots (zset).
-- ARGV: 1 job, 2 attempt, 3 id of the caller's last entry, 4 entry, 5 status
-- Returns 'ok' | 'stale' (another attempt owns the log) | 'gone' (no such job) | 'behind' (the log does not end with
-- the caller's last entry: send it again). Safe to repeat.
local check = check_writer(ARGV[1], ARGV[2], ARGV[3])
if check == 'repeat' then return 'ok' end
if check ~= 'ok' then return check end

-- the owner is charged for the tokens that `Ended` tells, in place of the estimate
local events = cmsgpack.unpack(ARGV[4])[2]
local usage = events[#events][4]
if usage then
  local f = redis.call('HMGET', K.job .. ARGV[1], 'model', 'band', 'owner', 'cost', 'weight')
  correct(f[1], f[2], f[3], (usage[1] + usage[2] - f[4]) / f[5])
end
finish(ARGV[1], next_id(ARGV[3]), ARGV[4], ARGV[5], usage or { 0, 0 }, clock())
return 'ok'
