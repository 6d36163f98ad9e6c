#!/usr/bin/env bash
# What kube-score and helm's own lint find in the chart's manifests: charts/score.sh. Needs helm, and Go for the first time.
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")/.."
VERSION=v1.20.0
CACHE=${KVPOOL_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/kvpool}
TOOLS=$CACHE/tools/kube-score-$VERSION

helm=$(command -v helm || ls -t "$CACHE"/airgap/bin-*/helm 2>/dev/null | head -1) || true
[ -n "$helm" ] || { echo "helm is needed: install it, or run e2e/airgap/binaries.sh helm" >&2; exit 2; }
if [ ! -x "$TOOLS/kube-score" ]; then
  command -v go >/dev/null || { echo "building kube-score needs Go" >&2; exit 2; }
  echo "building kube-score $VERSION (about a minute)"
  # the module is complete in itself: its versions are checked against the public checksum database
  GOBIN=$TOOLS GOFLAGS=-buildvcs=false CGO_ENABLED=0 GOMODCACHE=$CACHE/airgap/gomodcache GOCACHE=$CACHE/airgap/gocache \
    go install "github.com/zegl/kube-score/cmd/kube-score@$VERSION" 2>&1 | grep -v '^go: downloading' || true
fi

"$helm" lint --quiet --strict charts/kvpool
# No limit on processor time: an operator or webhook that is throttled answers late. Images carry versions or digests, so
# pulling them at every start would only stop pods while a registry is away.
"$helm" template kvpool charts/kvpool -n kvpool-system --skip-tests --set crds.enabled=false \
  --set networkPolicy.enabled=true --set priorityClass.create=true |
  "$TOOLS/kube-score" score --kubernetes-version v1.34 --ignore-container-cpu-limit \
    --ignore-test container-image-pull-policy --output-format ci - | { grep -vE '^\[(OK|SKIPPED)\]' || true; } |
  { ! grep -E '^\[CRITICAL\]'; } || { echo "kube-score: see above" >&2; exit 1; }
echo "charts/kvpool: nothing critical"
