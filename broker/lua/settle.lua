#!lua flags=allow-oom
-- settle: append the terminal entry of a job and free everything it holds.
-- Reads and writes: job, readers (hash), log (stream), leases, unread, deadlines, queue (zset), held (set).
-- ARGV: 1 job, 2 attempt, 3 id of the caller's last entry, 4 entry, 5 status
-- Returns 'ok' | 'stale' (another attempt owns the log) | 'gone' (no such job) | 'behind' (the log does not end with
-- the caller's last entry: send it again). Safe to repeat.
local check = check_writer(ARGV[1], ARGV[2], ARGV[3])
if check == 'repeat' then return 'ok' end
if check == 'ok' then finish(ARGV[1], next_id(ARGV[3]), ARGV[4], ARGV[5], clock()) end
return check
