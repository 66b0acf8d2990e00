#!/bin/sh
# Start as primary or as its replica, as PRIMARY says: the name of the pod that takes writes.
set -eu
me="${HOSTNAME}"
folder="${CONFIG_FOLDER:-/config}"
primary="$(cat "$folder/primary")"
if [ "$me" = "$primary" ]; then
    exec valkey-server "$folder/valkey.conf" --dir "${DATA_FOLDER:-/data}" "$@"
fi
exec valkey-server "$folder/valkey.conf" --dir "${DATA_FOLDER:-/data}" \
    --replicaof "${PRIMARY_HOST:-$primary.headrace-valkey-nodes}" "${PRIMARY_PORT:-6379}" \
    --masteruser replica --masterauth "$REPLICA_PASSWORD" "$@"
