#!/bin/sh
# Make the passwords of a try-out, once: secrets/*.env and the broker's users, as `headrace redis-acl` has them. Nothing of
# it is committed. HEADRACE is the command, if it is not on PATH.
set -eu
cd "$(dirname "$0")"
[ -e secrets ] && { echo "secrets/ is there already" >&2; exit 1; }
umask 077
mkdir secrets
random() { head -c 24 /dev/urandom | od -An -tx1 | tr -d ' \n'; }
for user in gateway worker scaler loader ops replica; do echo "$user=$(random)"; done >secrets/passwords
"${HEADRACE:-headrace}" redis-acl --users gateway,worker,scaler,loader,ops,replica --passwords secrets/passwords >secrets/users.acl
sed -nE 's,^(gateway|worker|scaler|loader)=(.*)$,\1-url=redis://\1:\2@headrace-valkey:6379/0,p' secrets/passwords >secrets/redis.env
sed -nE 's,^(replica|ops)=,\1-password=,p' secrets/passwords >secrets/valkey.env
printf 'redis-password=%s\n' "$(random)" >secrets/ray.env
