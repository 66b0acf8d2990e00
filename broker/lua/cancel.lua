#!lua flags=allow-oom
-- cancel: end a waiting job at once, mark a running one.
-- Reads and writes: job, load, fair (hash), log (stream), queue, ages, unread, deadlines, news (zset).
-- ARGV: 1 job, 2 cause
-- Returns 'waiting' | 'running' | 'ended' | 'unknown': what the job was. Safe to repeat.
return cancel(ARGV[1], ARGV[2], clock())
