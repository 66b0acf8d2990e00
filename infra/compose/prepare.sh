#!/bin/sh
# Make headrace.yaml with a key of your own, and print the key, once: only its hash is kept.
set -eu
cd "$(dirname "$0")"
[ -e headrace.yaml ] && { echo "headrace.yaml is there already" >&2; exit 1; }
key="hr-$(head -c 24 /dev/urandom | od -An -tx1 | tr -d ' \n')"
hash="$(printf %s "$key" | sha256sum | cut -d ' ' -f 1)"
sed "s/KEY/$hash/" headrace.example.yaml >headrace.yaml
echo "$key"
