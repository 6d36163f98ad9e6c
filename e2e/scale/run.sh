#!/bin/bash
# `make scale`: in a network of its own, where the addresses of all played pods are this machine's.
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")/../.."
[ "$(id -u)" = 0 ] || { echo "make scale makes a network of its own: it wants root"; exit 2; }
e2e/airgap/binaries.sh etcd kube helm >/dev/null
e2e/scale/kwok.sh >/dev/null
net='ip link set lo up && ip addr add 10.63.0.1/32 dev lo && ip route add default dev lo && ip route add local 10.64.0.0/14 dev lo'
exec unshare --net -- bash -c "$net"' && exec "$@"' \
  - .venv/bin/python e2e/scale "$@"
