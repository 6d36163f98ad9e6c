#!/usr/bin/env bash
# Builds valkey-server with TLS from Debian's source, by hash, for the sidecar's image and the tests. Prints its path.
#
#   images/index-server.sh          build it, or use the one in the cache (4 minutes of one processor the first time)
#   images/index-server.sh --path   print the path alone; the file exists only after a build
#
# Needs Debian 12 (the images' base has the same libssl3) with gcc, make, libssl-dev and curl. Ends with 3 if it cannot
# be built here; callers continue with the server of the wheel, which has no TLS.
#
# KVPOOL_CACHE   where it is kept, outside the clone   (~/.cache/kvpool)
set -euo pipefail

VERSION=9.1.2
SHA256=8e8557da7426a51b4e0fb514a65ef6241dc7c85cb408243af389070abf379cec
SOURCE=pool/main/v/valkey/valkey_$VERSION.orig.tar.gz

CACHE=${KVPOOL_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/kvpool}/index-server
folder=$CACHE/valkey-$VERSION-${SHA256:0:12}-$(uname -m)
binary=$folder/valkey-server

[ "${1:-}" != --path ] || { echo "$binary"; exit 0; }
[ ! -x "$binary" ] || { echo "$binary"; exit 0; }

cannot() { echo "index server: it cannot be built with TLS here: $1" >&2; exit 3; }
grep -q '^VERSION_CODENAME=bookworm' /etc/os-release 2>/dev/null || cannot "this is not Debian 12, the base of the images"
for tool in gcc make curl apt-get sha256sum; do command -v "$tool" >/dev/null || cannot "there is no $tool"; done
echo '#include <openssl/ssl.h>' | gcc -E -x c - >/dev/null 2>&1 || cannot "libssl-dev is missing"

mkdir -p "$CACHE"
exec 9>"$CACHE/lock"
flock 9
[ ! -x "$binary" ] || { echo "$binary"; exit 0; } # another process has built it meanwhile
work=$(mktemp -d "$CACHE/build.XXXXXX")
trap 'rm -rf "$work"' EXIT

# the machine's own Debian mirror has the sources of all releases
mirrors=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 2>/dev/null | sort -u) || true
for mirror in $mirrors; do
  curl -fsSL --max-time 120 -o "$work/source.tar.gz" "${mirror%/}/$SOURCE" 2>/dev/null && break
  rm -f "$work/source.tar.gz"
done
[ -f "$work/source.tar.gz" ] || cannot "no mirror of apt has $SOURCE"
echo "$SHA256  $work/source.tar.gz" | sha256sum -c --quiet - >&2 || cannot "the source has another hash"

echo "index server: building Valkey $VERSION with TLS (about 4 minutes of one processor)" >&2
mkdir "$work/source"
tar -xzf "$work/source.tar.gz" -C "$work/source" --strip-components=1
make -C "$work/source" -j "${JOBS:-1}" BUILD_TLS=yes MALLOC=libc USE_SYSTEMD=no valkey-server >"$CACHE/build.log" 2>&1 ||
  cannot "make failed; all of it is in $CACHE/build.log"
strip "$work/source/src/valkey-server"
"$work/source/src/valkey-server" --version >&2
mkdir -p "$folder"
cp "$work/source/COPYING" "$folder/COPYING"
mv "$work/source/src/valkey-server" "$binary"
echo "$binary"
