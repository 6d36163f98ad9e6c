#!/bin/bash
# dockerd.sh up: start dockerd as a plain process where no docker daemon answers.
# dockerd.sh down: end the one that `up` started, and no other.
# dockerd.sh ours: status 0 while the one that `up` started runs.
. "$(dirname "$(readlink -f "$0")")/lib.sh"
PIDFILE=$KEEP/docker/pid
PATH=$PATH:/usr/sbin:/sbin

ours() { [ -f "$PIDFILE" ] && [ "$(cat "/proc/$(cat "$PIDFILE")/comm" 2>/dev/null)" = dockerd ]; }

up() {
  docker info >/dev/null 2>&1 && return
  [ "$(id -u)" = 0 ] || die "no docker daemon answers, and only root can start one"
  local options=() pid
  if ! holds_cap_sys_resource; then
    local bin
    bin=$("$AIRGAP/binaries.sh" runc-fit)
    options=(--add-runtime "runc-fit=$bin/runc-fit" --default-runtime runc-fit)
  fi
  lock
  mkdir -p "$KEEP/docker" "$LOGS"
  # Three nodes in containers open more inotify watches than the default allows.
  sysctl -qw net.ipv4.ip_forward=1 fs.inotify.max_user_instances=1024 \
    fs.inotify.max_user_watches=524288 || say "  (these limits could not be set)"
  setsid nohup dockerd --data-root "$KEEP/docker/data" --exec-root "$KEEP/docker/exec" --pidfile "$PIDFILE" \
    "${options[@]}" >"$LOGS/dockerd.log" 2>&1 </dev/null 9>&- &
  pid=$!
  for _ in $(seq 300); do
    docker info >/dev/null 2>&1 && return
    kill -0 "$pid" 2>/dev/null || break
    sleep 0.1
  done
  tail -n 20 "$LOGS/dockerd.log" >&2
  die "dockerd does not start; all of it is in $LOGS/dockerd.log"
}

down() {
  ours || return 0
  local pid
  pid=$(cat "$PIDFILE")
  kill "$pid"
  for _ in $(seq 300); do
    kill -0 "$pid" 2>/dev/null || return 0
    sleep 0.1
  done
  die "dockerd (process $pid) does not end"
}

case ${1:-} in
  up | down | ours) "$1" ;;
  *) die "usage: dockerd.sh up|down|ours" ;;
esac
