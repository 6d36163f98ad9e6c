#!/usr/bin/env bash
# The whole path over soft-RoCE in a virtual machine: reads between sidecars by NIXL over verbs, and an NFS mount over RDMA as
# the shared tier. About 2 minutes once the guest is built. KVPOOL_RDMA_LIMIT: seconds before it is given up (480).
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")/../.."
mkdir -p out
began=$(date +%s)
work=$(e2e/rdma/build.sh)
echo "e2e-rdma: the guest is built ($(($(date +%s) - began)) s); it starts now, emulated"
booted=$(date +%s)
timeout "${KVPOOL_RDMA_LIMIT:-480}" qemu-system-x86_64 -M pc,graphics=off -accel tcg,thread=multi -cpu max -smp 2 -m 2048 \
  -display none -serial stdio -no-reboot -kernel "$work/vmlinuz" -initrd "$work/initrd.gz" \
  -append "console=ttyS0 panic=-1 quiet mitigations=off" \
  -drive "file=$work/root.img,if=none,id=disk,format=raw,snapshot=on" -device virtio-blk-pci,drive=disk \
  -netdev user,id=net,restrict=on -device virtio-net-pci,netdev=net,host_mtu=9000,romfile= \
  </dev/null 2>&1 | tr -d '\r' > out/e2e-rdma.log &
guest=$!
trap 'kill -- -$guest 2>/dev/null || true; pkill -P $guest 2>/dev/null || true' EXIT INT TERM
tail -n +1 -F --pid=$guest out/e2e-rdma.log 2>/dev/null | grep --line-buffered -E '^(GUEST|RDMA):' || true
wait $guest || true
echo "e2e-rdma: the guest ran $(($(date +%s) - booted)) s; its log is out/e2e-rdma.log"
grep -q '^GUEST-RC=0$' out/e2e-rdma.log || { tail -n 60 out/e2e-rdma.log; echo "e2e-rdma: failed"; exit 1; }
echo "e2e-rdma: passed"
