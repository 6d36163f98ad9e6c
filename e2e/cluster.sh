#!/bin/bash
# A kind cluster for the end-to-end tests: one control plane, two workers (kind.yaml).
#
#   eval "$(e2e/cluster.sh up)"    make the cluster, or keep the one that stands as asked; then KUBECONFIG is
#                                  set, and kind, kubectl, helm are on PATH. Progress goes to stderr.
#   e2e/cluster.sh prepare         all of `up` but the cluster: docker, tools, base image, node image.
#                                  Prints the same exports; `docker build` works from here on.
#   e2e/cluster.sh env             print the exports alone
#   e2e/cluster.sh load IMAGE...   bring images of the local docker onto the workers (--all: all nodes)
#   e2e/cluster.sh status          what runs
#   e2e/cluster.sh down            remove the cluster, its shared folder, and a docker daemon that we started
#                                  (KEEP_DOCKERD=1 keeps it; a daemon of the machine is never touched)
#
# The exports: KUBECONFIG; PATH; KVPOOL_BASE_IMAGE (Debian bookworm with Python 3.11 and pip at /usr/bin, for
# `docker build --build-arg BASE_IMAGE=...` and for engine pods; in airgap mode every node has it, elsewhere
# it must be loaded); KVPOOL_SHARED (the host folder that both workers have at /mnt/kvpool-shared).
# On the workers: /opt/kvpool-engine (read-only, from $KVPOOL_ENGINE_ENV), /mnt/kvpool-shared (one folder for
# both); everything else, /var/lib/kvpool for one, belongs to that node alone and goes with it.
#
# Environment:
#   KVPOOL_ENGINE_ENV   host folder of the engine's Python environment (default: an empty folder)
#   KIND_NODE_IMAGE     use this node image
#   KVPOOL_E2E_MODE     plain: kind with images of a registry; airgap: make all of it (airgap/README.md).
#                       Default: plain where docker runs and can pull, else airgap (needs root, apt-get, Go).
#   KVPOOL_CLUSTER      name of the cluster (default kvpool)
#   KVPOOL_CACHE        where built things and state are kept (default ~/.cache/kvpool)
. "$(dirname "$(readlink -f "$0")")/airgap/lib.sh"

NAME=${KVPOOL_CLUSTER:-kvpool}
STATE=$CACHE/e2e/$NAME
REGISTRY_NODE_IMAGE=kindest/node:v1.34.0 # the one that kind v0.30 is released with
REGISTRY_DEBIAN=debian:$SUITE-slim
export KUBECONFIG=$STATE/kubeconfig PATH=$STATE/bin:$PATH

have_image() { docker image inspect "$1" >/dev/null 2>&1; }

choose_mode() {
  if [ -n "${KVPOOL_E2E_MODE:-}" ]; then
    [[ $KVPOOL_E2E_MODE =~ ^(plain|airgap)$ ]] || die "KVPOOL_E2E_MODE is plain or airgap"
    echo "$KVPOOL_E2E_MODE"
  elif "$AIRGAP/dockerd.sh" ours || ! docker info >/dev/null 2>&1; then
    echo airgap
  # a pull of 30 MB tells whether a registry can be reached
  elif have_image "$REGISTRY_DEBIAN" || timeout 30 docker pull -q "$REGISTRY_DEBIAN" >/dev/null 2>&1; then
    echo plain
  else
    echo airgap
  fi
}

prepare() {
  local mode image tool built=() bin
  mkdir -p "$STATE/bin"
  mode=$(choose_mode)
  say "cluster $NAME: mode $mode"
  if [ "$mode" = airgap ]; then
    "$AIRGAP/packages.sh"
    built=(kube kind kubectl helm)
  else
    docker info >/dev/null || die "plain mode needs a docker daemon that this user may use"
    for tool in kind kubectl helm; do
      rm -f "$STATE/bin/$tool" # of an earlier run: PATH decides
      command -v "$tool" >/dev/null || built+=("$tool")
    done
  fi
  if [ ${#built[@]} -gt 0 ]; then
    bin=$("$AIRGAP/binaries.sh" "${built[@]}")
    for tool in "${built[@]}"; do ln -sfn "$bin/$tool" "$STATE/bin/$tool"; done
  fi
  if [ "$mode" = airgap ]; then
    "$AIRGAP/dockerd.sh" up
    "$AIRGAP/base-image.sh"
    image=${KIND_NODE_IMAGE:-$("$AIRGAP/node-image.sh")}
  else
    "$AIRGAP/base-image.sh" "$REGISTRY_DEBIAN"
    image=${KIND_NODE_IMAGE:-$REGISTRY_NODE_IMAGE}
    have_image "$image" || step "pulling $image" docker pull -q "$image"
  fi
  echo "$image" >"$STATE/node-image"
}

exports() {
  printf 'export KUBECONFIG=%q PATH=%q:"$PATH" KVPOOL_BASE_IMAGE=%q KVPOOL_SHARED=%q\n' \
    "$KUBECONFIG" "$STATE/bin" "$PYTHON_IMAGE" "$STATE/shared"
}

config() {
  local text engine=${KVPOOL_ENGINE_ENV:-$STATE/no-engine}
  mkdir -p "$STATE/no-engine"
  [ -d "$engine" ] || die "KVPOOL_ENGINE_ENV is no folder: $engine"
  text=$(<"$AIRGAP/../kind.yaml")
  text=${text//'${KVPOOL_ENGINE_ENV}'/"$(readlink -f "$engine")"}
  printf '%s\n' "${text//'${KVPOOL_SHARED}'/"$STATE/shared"}"
  holds_cap_sys_resource || cat "$AIRGAP/kind-without-sys-resource.yaml"
}

containers() { docker ps -aq --filter "label=io.x-k8s.kind.cluster=$NAME" "$@"; }
workers() { containers --filter label=io.x-k8s.kind.role=worker; }
remove() {
  local nodes worker
  nodes=$(containers)
  # pods may have written there as root, which this user need not be
  worker=$(workers | head -1)
  [ -z "$worker" ] || docker exec "$worker" find /mnt/kvpool-shared -mindepth 1 -delete ||
    say "  (the shared folder could not be emptied)"
  [ -z "$nodes" ] || xargs -n1 -P3 docker rm -f -v <<<"$nodes" >/dev/null
  rm -rf "$KUBECONFIG" "$STATE/made-from" "$STATE/shared"
}

up() {
  local image made
  prepare
  image=$(cat "$STATE/node-image")
  config >"$STATE/kind.yaml"
  made=$({ image_id "$image"; cat "$STATE/kind.yaml"; } | hash)
  if [ "$(cat "$STATE/made-from" 2>/dev/null)" = "$made" ] &&
    kubectl wait --for=condition=Ready nodes --all --timeout=10s >/dev/null 2>&1; then
    say "cluster $NAME stands"
  else
    remove
    mkdir "$STATE/shared"
    chmod 1777 "$STATE/shared" # as on a shared file system, any node and user may make its own folders
    trap failed EXIT
    step "cluster $NAME" \
      kind create cluster --name "$NAME" --image "$image" --config "$STATE/kind.yaml" --retain
    step "nodes ready" kubectl wait --for=condition=Ready nodes --all --timeout=180s
    step "cluster DNS ready" kubectl -n kube-system rollout status deployment/coredns --timeout=120s
    echo "$made" >"$STATE/made-from"
    trap - EXIT
  fi
  exports
}

failed() {
  local status=$?
  trap - EXIT
  trap '' INT TERM
  if ((status != 130)); then
    say "  saving the nodes' logs in $LOGS/$NAME"
    timeout 60 kind export logs --name "$NAME" "$LOGS/$NAME" >/dev/null 2>&1 ||
      say "  (the logs could not be saved)"
  fi
  say "  removing the cluster"
  remove
}

load() {
  local nodes
  if [ "${1:-}" = --all ]; then
    shift
    nodes=$(containers)
  else
    nodes=$(workers)
  fi
  [ -n "$nodes" ] || die "no cluster $NAME: e2e/cluster.sh up makes it"
  [ $# -gt 0 ] || die "usage: cluster.sh load [--all] IMAGE..."
  nodes=$(docker inspect -f '{{slice .Name 1}}' $nodes | sort | paste -sd,)
  if [ "$(cat "$STATE/node-image")" = "$NODE_IMAGE" ]; then
    step "images onto $nodes" python3 "$AIRGAP/load.py" --nodes "$nodes" "$@"
  else
    step "images onto $nodes" kind load docker-image --name "$NAME" --nodes "$nodes" "$@"
  fi
}

status() {
  docker info >/dev/null 2>&1 || { say "no docker daemon answers"; return; }
  if "$AIRGAP/dockerd.sh" ours; then say "docker daemon: our own"; else say "docker daemon: the machine's"; fi
  if [ -z "$(containers)" ]; then say "no cluster $NAME"; return; fi
  kubectl get nodes -o wide >&2
}

down() {
  if docker info >/dev/null 2>&1; then
    remove
    # another cluster on the same daemon keeps it
    if [ "${KEEP_DOCKERD:-}" != 1 ] && [ -z "$(docker ps -q)" ]; then "$AIRGAP/dockerd.sh" down; fi
  fi
  rm -rf "$STATE"
}

command=${1:-}
shift || true
case $command in
  prepare)
    prepare
    exports ;;
  env) exports ;;
  up | load | status | down) "$command" "$@" ;;
  *) die "usage: cluster.sh up | prepare | env | load [--all] IMAGE... | status | down" ;;
esac
