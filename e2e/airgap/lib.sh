# Sourced by the scripts of this folder and by ../cluster.sh: where things are kept, progress lines, errors.
set -euo pipefail
shopt -s inherit_errexit

AIRGAP=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
CACHE=${KVPOOL_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/kvpool}
KEEP=$CACHE/airgap
LOGS=$KEEP/logs
SUITE=bookworm # the Debian release of every image made here; its Python is 3.11

say() { printf '%s\n' "$*" >&2; }
die() { say "error: $*"; exit 1; }

# step WHAT COMMAND...: runs the command with its output in a log; prints how long it takes, the time every
# 15 s, and the end of the log if it fails. The command gets a process group of its own, so that Ctrl-C ends
# all of it.
step() {
  local what=$1 log pid status=0 start=$SECONDS next=15 idle interrupted=
  shift
  mkdir -p "$LOGS"
  log=$LOGS/$(tr -cs 'a-z0-9\n' - <<<"${what,,}").log
  exec {idle}<> <(:) # a file that never has input: `read -t` on it sleeps without a process
  trap 'interrupted=1' INT TERM
  set -m
  ("$@") >"$log" 2>&1 </dev/null &
  pid=$!
  set +m
  while [ -z "$interrupted" ] && kill -0 "$pid" 2>/dev/null; do
    read -rt 0.1 -u "$idle" || true
    if ((SECONDS - start >= next)); then
      say "  $what: $((SECONDS - start)) s"
      next=$((next + 15))
    fi
  done
  exec {idle}>&-
  if [ -n "$interrupted" ]; then
    trap '' INT TERM # what cleans up is not to be interrupted
    kill -TERM -- "-$pid" 2>/dev/null || true # it may have just ended
    wait "$pid" 2>/dev/null || true
    say "interrupted: $what"
    exit 130
  fi
  trap - INT TERM
  wait "$pid" || status=$?
  if ((status)); then
    tail -n 30 "$log" >&2
    die "$what failed (status $status); all of it is in $log"
  fi
  say "  $what: done in $((SECONDS - start)) s"
}

# Seconds-long things that only one process may do at a time: builds, images, the daemon.
lock() {
  mkdir -p "$KEEP"
  exec 9>"$KEEP/lock"
  flock -n 9 || { say "  waiting for another build in $KEEP"; flock 9; }
}

holds_cap_sys_resource() {
  local mask
  mask=$(sed -n 's/^CapBnd:[[:space:]]*//p' /proc/self/status)
  (((0x$mask >> 24) & 1))
}

# Versions stand in go.mod alone.
module_version() { sed -n "s#^[[:space:]]*$1 \(v[^ ]*\).*#\1#p" "$AIRGAP/go.mod" | head -1; }
K8S_VERSION=$(module_version k8s.io/kubernetes)
KIND_VERSION=$(module_version sigs.k8s.io/kind)
export GOMODCACHE=$KEEP/gomodcache GOCACHE=$KEEP/gocache GOFLAGS='-buildvcs=false -mod=readonly' CGO_ENABLED=0

DEBIAN_IMAGE=kvpool-local/debian:$SUITE
PYTHON_IMAGE=kvpool-local/python:3.11
NODE_IMAGE=kvpool-local/node:$K8S_VERSION

# Images carry a hash of what they were made from, so that a changed recipe is noticed.
MADE_FROM=kvpool.dev/made-from
made_from() { docker image inspect -f "{{index .Config.Labels \"$MADE_FROM\"}}" "$1" 2>/dev/null || true; }
image_id() { docker image inspect -f '{{.Id}}' "$1"; }
hash() { sha256sum | cut -c1-12; }
# image_from DOCKERFILE CONTEXT OPTION...: apt-get in it has this machine's network and proxies
image_from() {
  docker build --network=host --build-arg http_proxy --build-arg https_proxy --build-arg no_proxy \
    -f "$AIRGAP/images/$1" "${@:3}" "$2"
}
