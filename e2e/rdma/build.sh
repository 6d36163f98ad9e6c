#!/usr/bin/env bash
# Builds a small virtual machine with soft-RoCE, NFS over RDMA and this project's wheels. Prints its folder.
#
#   e2e/rdma/build.sh        (after `make setup`; needs root, apt-get, about 3 GB in the cache; 2 to 4 minutes the first time)
#
# Debian's kernel has the modules that the kernel of this machine may lack: rdma_rxe, rpcrdma, nfsd. The guest runs under
# software emulation, so nothing of the processor is asked for, and its figures say nothing about speed.
# KVPOOL_CACHE: where packages and the root file system are kept (~/.cache/kvpool)
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")/../.."
HERE=$PWD/e2e/rdma
CACHE=${KVPOOL_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/kvpool}/rdma-guest
SUITE=bookworm
PACKAGES=iproute2,kmod,nfs-common,nfs-kernel-server,rdma-core,ibverbs-providers,rdmacm-utils,udev,procps,netbase,python3
HOST_PACKAGES=(qemu-system-x86 debootstrap busybox-static cpio kmod e2fsprogs)
say() { echo "e2e-rdma: $*" >&2; }
die() { say "$*"; exit 2; }

[ "$(id -u)" = 0 ] || die "making a root file system needs root"
[ "$(uname -m)" = x86_64 ] || die "the guest is made for x86_64 only"
missing=()
for package in "${HOST_PACKAGES[@]}"; do dpkg -s "$package" >/dev/null 2>&1 || missing+=("$package"); done
if [ ${#missing[@]} -gt 0 ]; then
  command -v apt-get >/dev/null || die "install ${missing[*]}"
  say "installing ${missing[*]}"
  { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}"; } >&2 ||
    die "apt-get could not install ${missing[*]}"
fi
mkdir -p "$CACHE" && cd "$CACHE"
exec 9>lock && flock 9

kernel=$(apt-cache depends linux-image-amd64 | sed -n 's/.*Depends: \(linux-image-[0-9].*\)/\1/p' | head -n 1)
[ -n "$kernel" ] || die "apt knows no linux-image-amd64: run apt-get update"
stamp=$(printf '%s\n' "$SUITE" "$PACKAGES" "$kernel" | sha256sum | cut -c1-16)
if [ ! -f "root-$stamp/.complete" ]; then
  rm -rf root-* kernel-* && mkdir "kernel-$stamp"
  say "fetching $kernel and Debian $SUITE (about 300 MB)"
  (cd "kernel-$stamp" && apt-get -o APT::Sandbox::User=root download -qq "$kernel" && dpkg-deb -x "$kernel"*.deb . && rm -f ./*.deb) >&2
  debootstrap --variant=minbase --include="$PACKAGES" "$SUITE" "root-$stamp" > debootstrap.log 2>&1 ||
    { tail -n 20 debootstrap.log >&2; die "debootstrap failed"; }
  rm -rf "root-$stamp"/var/cache/apt/* "root-$stamp"/var/lib/apt/lists/* "root-$stamp"/usr/share/{doc,man,locale}
  version=$(ls "kernel-$stamp/lib/modules")
  mkdir -p "root-$stamp/lib/modules" && cp -a "kernel-$stamp/lib/modules/$version" "root-$stamp/lib/modules/"
  for kind in gpu media wireless iio staging hwmon usb scsi; do
    rm -rf "root-$stamp/lib/modules/$version/kernel/drivers/$kind"
  done
  rm -rf "root-$stamp/lib/modules/$version/kernel/sound"
  depmod -b "$PWD/root-$stamp" "$version"
  touch "root-$stamp/.complete"
fi
version=$(ls "kernel-$stamp/lib/modules")

# the project's wheels and what they need, as the image of the sidecar has them
cd "$HERE/../.."
python=.venv/bin/python
site=$CACHE/site-$(cat requirements/sidecar.txt requirements/rdma.txt | sha256sum | cut -c1-16)
if [ ! -d "$site" ]; then
  say "fetching the wheels of the sidecar and NIXL"
  rm -rf "$CACHE"/site-*
  for file in sidecar rdma; do
    "$python" -m pip install -q --disable-pip-version-check --no-deps --require-hashes --only-binary=:all: \
      --python-version 3.11 --implementation cp --platform "manylinux2014_x86_64" --platform manylinux_2_28_x86_64 \
      --platform manylinux_2_34_x86_64 --upgrade --target "$site.partial" -r "requirements/$file.txt" >&2
  done
  mv "$site.partial" "$site"
fi
work=$CACHE/work
rm -rf "$work" && mkdir -p "$work/wheels"
"$python" -m pip wheel -q --disable-pip-version-check --no-build-isolation --no-deps -w "$work/wheels" ./client ./sidecar >&2
root=$CACHE/root-$stamp
rm -rf "$root/opt/site" && mkdir -p "$root/opt/site"
cp -a "$site/." "$root/opt/site/"
"$python" -m pip install -q --disable-pip-version-check --no-deps --no-index --upgrade --target "$root/opt/site" "$work"/wheels/*.whl >&2
# the wheel brings a libibverbs of its own, which looks for drivers where Debian has none: soft-RoCE's is Debian's
for bundled in "$root"/opt/site/nixl_cu12.libs/libibverbs-*; do
  ln -sfn /usr/lib/x86_64-linux-gnu/libibverbs.so.1 "$bundled"
done
install -m 755 "$HERE/guest/start" "$root/sbin/kvpool-start"
install -m 644 "$HERE/guest/whole_path.py" "$root/opt/whole_path.py"

mkdir -p "$work/initrd"/{bin,proc,sys,dev,mnt,modules}
cp "$(command -v busybox)" "$work/initrd/bin/"
: > "$work/initrd/order"
for module in virtio_pci virtio_blk crc32c_generic ext4; do
  modprobe -d "$root" -S "$version" --show-depends "$module" | while read -r what file _; do
    [ "$what" = insmod ] || continue
    name=$(basename "$file")
    [ -f "$work/initrd/modules/$name" ] || { cp "$file" "$work/initrd/modules/" && echo "$name" >> "$work/initrd/order"; }
  done
done
install -m 755 "$HERE/guest/init" "$work/initrd/init"
(cd "$work/initrd" && find . | cpio -o -H newc --quiet | gzip -1) > "$work/initrd.gz"
cp "$CACHE/kernel-$stamp/boot/vmlinuz-$version" "$work/vmlinuz"
mke2fs -q -t ext4 -O ^has_journal -d "$root" "$work/root.img" 2600M >&2
echo "$work"
