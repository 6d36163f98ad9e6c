#!/usr/bin/env bash
# The whole path on a real kind cluster: tools, engine's environment, images, cluster, tests; then all of it goes.
#
#   e2e/run.sh [pytest arguments]
#
# LEVELS says which cases (default: smoke): smoke, full, disruptive, or some of them with `or` between them.
# KEEP=1 keeps the cluster for a look afterwards (e2e/cluster.sh down removes it).
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")/.."
started=$(date +%s)
say() { printf '\n-- e2e: %s (%d s)\n' "$*" $(($(date +%s) - started)); }

finish() {
  rc=$?
  trap - EXIT INT TERM
  if [ "${KEEP:-}" = 1 ]; then say "the cluster stays: eval \"\$(e2e/cluster.sh up)\""; else e2e/cluster.sh down || true; fi
  exit "$rc"
}
trap finish EXIT INT TERM

# four minutes of one processor the first time, beside the other builds
nice images/index-server.sh >/dev/null & index_server=$!

say "the engine's environment"
KVPOOL_ENGINE_ENV=$(e2e/engine/make.sh)
export KVPOOL_ENGINE_ENV

say "docker, kind, kubectl, helm, node image"
exports=$(e2e/cluster.sh prepare)
eval "$exports"

say "the operator's and the sidecar's image"
if wait "$index_server"; then export KVPOOL_INDEX_TLS=1; else echo "e2e: the index runs WITHOUT TLS in these tests"; fi
make images BASE_IMAGE="$KVPOOL_BASE_IMAGE" INDEX_TLS="${KVPOOL_INDEX_TLS:-}"
version=$(sed -n 's/^version = "\(.*\)"/\1/p' operator/pyproject.toml)
export KVPOOL_OPERATOR_IMAGE=kvpool-operator:$version KVPOOL_SIDECAR_IMAGE=kvpool-sidecar:$version

say "the cluster"
exports=$(e2e/cluster.sh up)
eval "$exports"
e2e/cluster.sh load "$KVPOOL_OPERATOR_IMAGE" "$KVPOOL_SIDECAR_IMAGE" "$KVPOOL_BASE_IMAGE"

say "the tests"
.venv/bin/python -m pytest -x -rP --timeout=900 --durations=15 -m "${LEVELS:-smoke}" e2e/cases "$@"
