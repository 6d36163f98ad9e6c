#!/usr/bin/env bash
# Checks on any machine that the images can be built for arm64 and that what they install runs there:
#
#   1. every wheel of requirements/*.txt that images install exists for aarch64, with the hash of the list;
#   2. on an emulated arm64 (qemu, from Debian's packages), all modules of the three distributions import, ciphers and
#      codecs give back what they got, and the index server of the wheel answers.
#
# No docker and no root: the emulator is registered in a user namespace of its own. Ends with 3 and the reason where a
# namespace, Debian's packages or the base's release are missing. About a minute; the second time half of it.
#
# KVPOOL_CACHE   where wheels and Debian's packages are kept, outside the clone   (~/.cache/kvpool)
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")/.."

PYTHON=.venv/bin/python
ARCH=aarch64
KEEP=${KVPOOL_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/kvpool}
CACHE=$KEEP/wheels
SUITE=bookworm
PACKAGES="python3.11 libpython3.11-stdlib libstdc++6 libssl3 zlib1g libgcc-s1 ca-certificates"
. images/fetch.sh

skip() { echo "arm64-check: SKIPPED the emulation: $1" >&2; exit 3; }

say() { echo "arm64-check: $*"; }

say "wheels"
folders=("$(fetch requirements/sidecar.txt 3.11)" "$(fetch requirements/operator.txt 3.11)")
folders+=("$(fetch requirements/s3.txt 3.11)" "$(fetch requirements/client-extras.txt 3.10 3.11 3.12 3.13)")
fetch requirements/rdma.txt 3.11 >/dev/null
say "every wheel exists for aarch64"

for tool in apt-get dpkg-deb unshare; do command -v "$tool" >/dev/null || skip "there is no $tool"; done
unshare -Urmpf true 2>/dev/null || skip "this kernel grants no user namespace"
mirror=$(apt-get indextargets --format '$(REPO_URI)' "Codename: $SUITE" 2>/dev/null | head -1)
[ -n "$mirror" ] || skip "apt knows no mirror of Debian $SUITE"
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
[ -e "$keyring" ] || skip "$keyring is missing"

debs=$KEEP/arm64/$(printf '%s' "$SUITE $PACKAGES" | sha256sum | cut -c1-12)
if [ ! -d "$debs" ]; then
  say "Debian's packages for arm64"
  part=$debs.partial
  rm -rf "$part"
  mkdir -p "$part"/{lists/partial,archives/partial,etc}
  : >"$part/status"
  echo "deb [signed-by=$keyring] $mirror $SUITE main" >"$part/etc/sources.list"
  apt=(apt-get -q -o "Dir::State=$part" -o "Dir::State::Lists=$part/lists" -o "Dir::State::status=$part/status"
    -o "Dir::Cache::Archives=$part/archives" -o "Dir::Etc::SourceList=$part/etc/sources.list"
    -o Dir::Etc::SourceParts=/dev/null -o APT::Sandbox::User=root -o Dir::Cache::pkgcache= -o Dir::Cache::srcpkgcache=)
  for one in "arm64 $PACKAGES" "$(dpkg --print-architecture) qemu-user-static"; do
    arch=${one%% *}
    "${apt[@]}" -o "APT::Architecture=$arch" -o "APT::Architectures::=$arch" update >"$part/log" 2>&1 ||
      { tail -3 "$part/log" >&2; skip "Debian's package lists cannot be had"; }
    # shellcheck disable=SC2086
    "${apt[@]}" -o "APT::Architecture=$arch" -o "APT::Architectures::=$arch" --no-install-recommends --download-only -y \
      install ${one#* } >>"$part/log" 2>&1 || { tail -3 "$part/log" >&2; skip "Debian's packages cannot be had"; }
  done
  rm -rf "$part"/{lists,etc,status}
  mv "$part" "$debs"
fi

work=$(mktemp -d "$KEEP/arm64/run.XXXXXX")
trap 'rm -rf "$work"' EXIT
root=$work/root
mkdir -p "$root"
for deb in "$debs"/archives/*.deb; do
  case $deb in
    *qemu-user-static*) dpkg-deb -x "$deb" "$work/qemu" ;;
    *_arm64.deb | *_all.deb) dpkg-deb -x "$deb" "$root" ;;
  esac
done
mkdir -p "$root"/{app,site,proc,dev,tmp}
# client-extras has a wheel for each Python; that of the base is taken
find "${folders[@]}" -name '*.whl' | grep -v -- '-cp31[023]-' | sort -u |
  "$PYTHON" -c 'import sys, zipfile; [zipfile.ZipFile(w.strip()).extractall(sys.argv[1]) for w in sys.stdin]' "$root/site"
find "$root/site" -name 'valkey-server' -exec chmod +x {} +
cp -r client/src/* sidecar/src/* operator/src/* "$root/app"
cp images/arm64_smoke.py "$root/smoke.py"
cp "$work"/qemu/usr/bin/qemu-aarch64-static "$root/usr/bin/"

say "modules, ciphers, codecs and the index server on emulated arm64"
# the bytes by which the kernel knows a program for aarch64 (Debian's qemu-user-static)
magic='\x7f\x45\x4c\x46\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00'
mask='\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff'
status=0
unshare -Urmpf bash -euc '
  mount -t binfmt_misc none /proc/sys/fs/binfmt_misc 2>/dev/null || exit 4
  [ -e /proc/sys/fs/binfmt_misc/kvpool-arm64 ] ||
    printf "%s" ":kvpool-arm64:M::$2:$3:$1/usr/bin/qemu-aarch64-static:F" >/proc/sys/fs/binfmt_misc/register || exit 4
  mount -t proc none "$1/proc"
  touch "$1/dev/null" "$1/dev/urandom"
  mount --bind /dev/null "$1/dev/null"
  mount --bind /dev/urandom "$1/dev/urandom"
  exec env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/tmp PYTHONPATH=/app:/site PYTHONDONTWRITEBYTECODE=1 \
    chroot "$1" /usr/bin/python3.11 /smoke.py
' bash "$root" "$magic" "$mask" || status=$?
[ "$status" != 4 ] || skip "this kernel grants no binfmt_misc in a user namespace"
[ "$status" = 0 ] || { echo "arm64-check: FAILED (status $status)" >&2; exit 1; }
say "done"
