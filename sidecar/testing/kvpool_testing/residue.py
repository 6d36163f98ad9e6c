"""What a process holds, what lies in a tier's directory, what a status still shows: invariants I4, I5 and I7.

After faults have stopped, a sidecar must look like one that has just been started on the same drive: no descriptor,
thread, child or temporary file more, nothing waiting, everything announced, everything within its bounds.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvpool_sidecar.shared_gc import metadata as folder
from kvpool_sidecar.storage.layout import POOL_ID, SWEEP

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Residue", "exceeded", "residue", "slope", "stray_files", "unsettled"]

_BLOCK = re.compile(r"blocks/([0-9a-f]{2})/([0-9a-f]{2})/([0-9a-f]{64})")
_QUARANTINED = re.compile(r"quarantine/[0-9a-f]{64}(\.[0-9a-z]+)*")
_OURS = {POOL_ID, "lost+found"}
_MIB = 1 << 20
_TABLE = "/memfd:kvpool-blocks"  # a block table stays for the next client of its tenant; there are at most 64


class Residue(NamedTuple):
    """Of one process, now."""

    descriptors: int
    threads: int
    children: int
    rss_bytes: int
    deleted_files: int  # files without a name that are still held open, other than block tables


def residue(pid: int) -> Residue:
    """ProcessLookupError or FileNotFoundError if there is no such process."""
    base = Path(f"/proc/{pid}")
    deleted = descriptors = 0
    for fd in (base / "fd").iterdir():
        try:
            target = os.readlink(fd)
        except FileNotFoundError:
            continue  # closed meanwhile
        descriptors += 1
        deleted += target.endswith(" (deleted)") and not target.startswith(_TABLE)
    status = dict(line.split(":", 1) for line in (base / "status").read_text().splitlines() if ":" in line)
    children = 0
    for task in (base / "task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # that thread has ended meanwhile
            children += len((task / "children").read_text().split())
    return Residue(descriptors, int(status["Threads"]), children, int(status["VmRSS"].split()[0]) * 1024, deleted)


def stray_files(tier: Path) -> list[str]:
    """Files in a tier's directory that are neither a block in its place, nor quarantined, nor the directory's own."""
    strays = []
    for file in tier.rglob("*"):
        name = file.relative_to(tier).as_posix()
        if file.is_dir():
            continue
        found = _BLOCK.fullmatch(name)
        if found and found[3].startswith(found[1] + found[2]):
            continue
        if name.startswith(f"{SWEEP}/") and folder.is_ours(file.name):
            continue
        if not (name in _OURS or _QUARANTINED.fullmatch(name)):
            strays.append(name)
    return sorted(strays)


def unsettled(status: dict[str, Any], *, clients: int = 0) -> list[str]:
    """Why a node's /status is not that of a quiet, whole node with so many connections; empty if it is."""
    index, shared = status["index"], status["shared"]
    reasons = {
        "it is not ready": not status["ready"],
        "its drives are not read through": not status["scanned"],
        "the index is not connected": index["configured"] and not index["connected"],
        "blocks are not announced": index["configured"] and index["announced"] < status["blocks"],
        "the shared tier is treated as absent": shared["configured"] and not shared["available"],
        "copies wait": shared["waiting"] > 0,
        "a drive is treated as failing": "failing" in status["drives"].values(),
        f"{status['clients']} clients are connected": status["clients"] != clients,
    }
    return [reason for reason, holds in reasons.items() if holds] + exceeded(status)


def exceeded(status: dict[str, Any]) -> list[str]:
    """Bounds that a node's /status shows to be broken (I5)."""
    if status["used_bytes"] > status["capacity_bytes"]:
        return [f"{status['used_bytes']} bytes are used of {status['capacity_bytes']}"]
    return []


def slope(samples: Sequence[tuple[float, float]]) -> float:
    """Least squares over (seconds, value): growth per second. 0 for fewer than two points in time."""
    n = len(samples)
    if n < 2:
        return 0.0
    mean_t = sum(t for t, _ in samples) / n
    mean_v = sum(v for _, v in samples) / n
    spread = sum((t - mean_t) ** 2 for t, _ in samples)
    return sum((t - mean_t) * (v - mean_v) for t, v in samples) / spread if spread else 0.0
