#!/usr/bin/env bash
# Print the folder of prometheus and promtool: those on PATH, or Debian's package in the cache (no installation, no root).
set -euo pipefail
CACHE=${KVPOOL_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/kvpool}
TOOLS=$CACHE/tools/prometheus

if promtool=$(command -v promtool) && command -v prometheus >/dev/null; then
  dirname "$promtool"
  exit
fi
mkdir -p "$TOOLS"
exec 9>"$TOOLS.lock"
flock 9 # several clones share the cache
if [ ! -x "$TOOLS/usr/bin/promtool" ] || [ ! -x "$TOOLS/usr/bin/prometheus" ]; then
  command -v apt-get >/dev/null || { echo "promtool and prometheus are needed: install Prometheus 2.42 or newer" >&2; exit 2; }
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
  cd "$work"
  echo "fetching Debian's package prometheus (19 MB)" >&2
  apt-get download -qq prometheus >&2 || { apt-get update -qq >&2 && apt-get download -qq prometheus >&2; } ||
    { echo "Debian's package prometheus cannot be had" >&2; exit 2; }
  dpkg -x prometheus_*.deb "$TOOLS"
fi
echo "$TOOLS/usr/bin"
