#!/bin/sh
# Make the passwords of a try-out, once: secrets/*.env and the broker's users. Nothing of it is committed.
set -eu
cd "$(dirname "$0")"
[ -e secrets ] && { echo "secrets/ is there already" >&2; exit 1; }
umask 077
mkdir secrets
random() { head -c 24 /dev/urandom | od -An -tx1 | tr -d ' \n'; }
gateway=$(random) worker=$(random) replica=$(random) ops=$(random)
printf 'gateway-url=redis://gateway:%s@headrace-valkey:6379/0\nworker-url=redis://worker:%s@headrace-valkey:6379/0\n' \
    "$gateway" "$worker" >secrets/redis.env
printf 'redis-password=%s\n' "$(random)" >secrets/ray.env
printf 'replica-password=%s\nops-password=%s\n' "$replica" "$ops" >secrets/valkey.env
ours='resetkeys resetchannels ~hr:* &hr:* -@all +@read +@write +@scripting +@pubsub +@connection -@dangerous +info +time'
{
    echo "user default off"
    echo "user gateway on >$gateway $ours"
    echo "user worker on >$worker $ours"
    echo "user replica on >$replica -@all +psync +replconf +ping"
    echo "user ops on >$ops allkeys allchannels +@all"
} >secrets/users.acl
