"""Checks of RDMA in this pod: devices, ports, GIDs of the pod's network namespace, and the memlock limit.

For RoCE, a device in a pod is useful only if one of its GIDs belongs to a network device of the pod's network
namespace. The kernel has the table (Documentation/ABI/stable/sysfs-class-infiniband); reading the owner of a GID
(`gid_attrs/ndevs`) fails for GIDs of other namespaces.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kvpool_sidecar.peers.rdma.selection import detect_rdma
from kvpool_sidecar.preflight.finding import failed, fine, warned

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvpool.config import PeerConfig
    from kvpool_sidecar.preflight.finding import Finding

__all__ = ["Port", "check_rdma", "ports"]

_MAX_DEVICES, _MAX_PORTS, _MAX_GIDS = 64, 8, 256
_NO_GID = "0000:0000:0000:0000:0000:0000:0000:0000"


class Port(NamedTuple):
    """One port of a device. `gids`: number of GIDs usable in this pod."""

    device: str
    number: str
    active: bool
    gids: int
    link: str


def ports(sys: str = "/sys", interfaces: frozenset[str] | None = None) -> list[Port]:
    """Return the ports of the visible devices. `interfaces`: network devices of this namespace."""
    here = _interfaces(sys) if interfaces is None else interfaces
    return [
        Port(
            device.name,
            port.name,
            _read(port / "state").endswith("ACTIVE"),
            _gids(port, here),
            _read(port / "link_layer") or "Ethernet",
        )
        for device in _entries(Path(sys, "class", "infiniband"), _MAX_DEVICES)
        for port in _entries(device / "ports", _MAX_PORTS)
    ]


def check_rdma(
    peer: PeerConfig,
    *,
    sys: str = "/sys",
    here: tuple[bool, bool] | None = None,
    memlock: int | None = None,
    interfaces: frozenset[str] | None = None,
) -> Iterator[Finding]:
    """Yield findings; only a pool that requires RDMA fails. `here`: whether NIXL and a device are present."""
    if peer.protocol == "TCP" or peer.encryption == "Always":
        return
    package, devices = detect_rdma() if here is None else here
    required = peer.protocol == "RDMA"
    missing = failed if required else warned
    if not devices:
        problem = "no RDMA device in this pod (/dev/infiniband/uverbs*)"
        if required:
            yield failed("RdmaDevice", problem, "set the device plugin's resource in transport.rdma.resources")
        else:
            yield fine("RdmaDevice", f"blocks are sent over TCP: {problem}")
        return
    if not package:
        yield missing("RdmaPackage", "a device is present, but the image has no NIXL", "build the image with RDMA=1")
    visible = ports(sys, interfaces)
    active = [port for port in visible if port.active]
    if not active:
        yield missing(
            "RdmaPort", f"none of {len(visible)} RDMA ports is active", "check the cable, the switch and the driver"
        )
    elif not any(port.gids for port in active):
        yield missing(
            "GIDTableEmpty",
            f"no GID of {', '.join(sorted({p.device for p in active}))[:100]} belongs to this pod's network namespace",
            "give the pod a network device of the adapter (SR-IOV, macvlan or host device plugin)",
        )
    else:
        usable = sum(port.gids for port in active)
        yield fine("Rdma", f"{len(active)} active ports, {usable} GIDs of this pod", gids=float(usable))
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if memlock is None else memlock
    if limit != resource.RLIM_INFINITY and limit < peer.rdma_bytes:
        yield missing(
            "MemlockTooLow",
            f"{limit >> 20} MiB can be pinned, but transport.rdma.memory is {peer.rdma_bytes >> 20} MiB",
            "raise the container runtime's memlock limit (LimitMEMLOCK=infinity of its unit)",
            memlock_bytes=float(limit),
        )


def _gids(port: Path, interfaces: frozenset[str]) -> int:
    """Count usable GIDs: all of InfiniBand, and for RoCE those of a network device of this namespace."""
    is_ethernet = _read(port / "link_layer") != "InfiniBand"
    count = 0
    for entry in _entries(port / "gids", _MAX_GIDS):
        if _read(entry) in ("", _NO_GID):
            continue
        owner = _read(port / "gid_attrs" / "ndevs" / entry.name)
        count += owner in interfaces if is_ethernet else True
    return count


def _interfaces(sys: str) -> frozenset[str]:
    return frozenset(entry.name for entry in _entries(Path(sys, "class", "net"), 4096))


def _entries(folder: Path, most: int) -> list[Path]:
    try:
        return [folder / name for name in sorted(os.listdir(folder))[:most]]
    except OSError:
        return []


def _read(path: Path) -> str:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(256).strip()
    except OSError:
        return ""
