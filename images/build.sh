#!/usr/bin/env bash
# Builds kvpool-operator:VERSION and kvpool-sidecar:VERSION. Wheels are fetched here, on the host, by hash; `docker build`
# itself runs without a network.
#
#   images/build.sh              (after `make setup`; or `make images`)
#
# BASE_IMAGE   base of both images: Debian bookworm with python3.11     (python:3.11-slim-bookworm)
# REGISTRY     prefix of the tags, such as registry.example/team        (none)
# RDMA         1: the sidecar's image gets NIXL, 240 MB; its base must have libibverbs1 and ibverbs-providers   (no)
# S3           1: the sidecar's image gets s3fs and what it needs, for spec.tiers[].objectStore with s3://   (no)
# INDEX_TLS    1: the sidecar's image gets an index server with TLS, for spec.index.managed.encryption: Always; it is
#              built from Debian's source on this machine (images/index-server.sh)   (no)
# ARCH         machine of the image: x86_64 or aarch64                  (this machine's)
# KVPOOL_CACHE where fetched wheels are kept, outside the clone         (~/.cache/kvpool)
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")/.."

PYTHON=.venv/bin/python
BASE_IMAGE=${BASE_IMAGE:-python:3.11-slim-bookworm}
ARCH=${ARCH:-$(uname -m)}
CACHE=${KVPOOL_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/kvpool}/wheels
VERSION=$(sed -n 's/^version = "\(.*\)"/\1/p' operator/pyproject.toml)
case $ARCH in
  "$(uname -m)") platform=() ;;
  x86_64) platform=(--platform linux/amd64) ;;
  aarch64) platform=(--platform linux/arm64) ;;
  *) echo "images: no wheels are known for $ARCH (set ARCH=x86_64 or ARCH=aarch64)" >&2; exit 2 ;;
esac
docker info >/dev/null 2>&1 || { echo "images: docker does not answer; start it, or set DOCKER_HOST" >&2; exit 2; }

. images/fetch.sh

build() {
  local name=$1 wheels=$2 context=dist/images/$1
  rm -rf "$context" && mkdir -p "$context"/{wheels,own}
  cp "$wheels"/*.whl "$context/wheels"
  cp "$pip"/pip-*.whl "$context/pip.whl"
  cp "requirements/$name.txt" "$context/requirements.txt"
  if [ "$name" = sidecar ] && [ "${RDMA:-}" = 1 ]; then
    cp "$rdma"/*.whl "$context/wheels"
    cat requirements/rdma.txt >> "$context/requirements.txt"
  fi
  if [ "$name" = sidecar ] && [ "${S3:-}" = 1 ]; then
    cp -n "$s3"/*.whl "$context/wheels"
    cat requirements/s3.txt >> "$context/requirements.txt"
  fi
  cp dist/wheels/kvpool-[0-9]*.whl "dist/wheels/kvpool_$name"-*.whl "$context/own"
  if [ "$name" = sidecar ]; then
    cp -r "$extras" "$context/extras"
    mkdir "$context/index-server"
    [ "${INDEX_TLS:-}" != 1 ] || cp "$(dirname "$index_server")"/* "$context/index-server"
  fi
  docker build -q --network none "${platform[@]}" --build-arg "BASE_IMAGE=$BASE_IMAGE" \
    -t "${REGISTRY:+${REGISTRY%/}/}kvpool-$name:$VERSION" -f "$name/Dockerfile" "$context" > "$context.id" 2> "$context.log" || { cat "$context.log" >&2; exit 1; }
  echo "images: ${REGISTRY:+${REGISTRY%/}/}kvpool-$name:$VERSION"
}

if [ "${INDEX_TLS:-}" = 1 ]; then
  [ "$ARCH" = "$(uname -m)" ] || { echo "images: INDEX_TLS=1 builds for this machine only, not for $ARCH" >&2; exit 2; }
  index_server=$(images/index-server.sh)
fi
pip=$(fetch requirements/images.txt 3.11)
operator=$(fetch requirements/operator.txt 3.11)
sidecar=$(fetch requirements/sidecar.txt 3.11)
[ "${S3:-}" != 1 ] || s3=$(fetch requirements/s3.txt 3.11)
[ "${RDMA:-}" != 1 ] || rdma=$(fetch requirements/rdma.txt 3.11)
extras=$(fetch requirements/client-extras.txt 3.10 3.11 3.12 3.13)
rm -rf dist/wheels
"$PYTHON" -m pip wheel -q --disable-pip-version-check --no-build-isolation --no-deps -w dist/wheels \
  ./client ./sidecar ./operator
build operator "$operator"
build sidecar "$sidecar"
