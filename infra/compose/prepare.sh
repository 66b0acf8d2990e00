#!/bin/sh
# Make headrace.yaml with a key of your own, and print the key, once: only its hash is kept. Make the broker's users too,
# as `headrace redis-acl` has them, with passwords in secrets/. HEADRACE is the command, if it is not on PATH.
set -eu
cd "$(dirname "$0")"
[ -e headrace.yaml ] && { echo "headrace.yaml is there already" >&2; exit 1; }
random() { head -c 24 /dev/urandom | od -An -tx1 | tr -d ' \n'; }
mkdir -p secrets
chmod 711 secrets
(
    umask 077
    for user in gateway worker loader ops; do
        password=$(random)
        echo "$user=$password" >>secrets/passwords
        echo "HEADRACE_REDIS__URL=redis://$user:$password@valkey:6379/0" >"secrets/$user.env"
    done
)
"${HEADRACE:-headrace}" redis-acl --users gateway,worker,loader,ops --passwords secrets/passwords >secrets/users.acl
chmod 644 secrets/users.acl # hashes only; the server in its container is another user
key="hr-$(random)"
hash="$(printf %s "$key" | sha256sum | cut -d ' ' -f 1)"
sed "s/KEY/$hash/" headrace.example.yaml >headrace.yaml
echo "$key"
