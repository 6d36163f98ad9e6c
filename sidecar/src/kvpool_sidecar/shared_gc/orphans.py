"""Orphans of a shared tier: abandoned temporary files, quarantined blocks and old notes.

Only regular files with our naming scheme are removed, and only if they are old by the mount's clock.
"""

from __future__ import annotations

import contextlib
import heapq
import os
import re
import stat
from typing import TYPE_CHECKING

from kvpool_sidecar.shared_gc import metadata as folder
from kvpool_sidecar.storage import layout as names

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvpool_sidecar.shared_gc.metadata import TierMetadata

__all__ = ["remove_orphans"]

_TEMPORARY = re.compile(r"[0-9a-f]{32}")
_POOL_ID = re.compile(rf"\.{names.POOL_ID}\.[0-9a-f]{{16}}")
_QUARANTINED = re.compile(r"[0-9a-f]{64}")
_KEPT_IN_QUARANTINE = 8


def remove_orphans(
    tier: TierMetadata, now: float, *, safe_age_s: float, model_age_s: float, is_lease_held: Callable[[], bool]
) -> Iterator[tuple[str, int]]:
    """Remove orphans; yield reason and bytes of each. Ends early once `is_lease_held()` is False."""
    old = now - safe_age_s
    for reason, fd, found in (
        ("temporary", tier.tmp, _older(tier.tmp, _TEMPORARY.fullmatch, old)),
        ("temporary", tier.root, _older(tier.root, _POOL_ID.fullmatch, old)),
        ("temporary", tier.sweep, _older(tier.sweep, folder.is_temporary, old)),
        ("temporary", tier.sweep, _older(tier.sweep, folder.NODE.fullmatch, old)),
        ("temporary", tier.sweep, _older(tier.sweep, folder.MODEL.fullmatch, now - model_age_s)),
        ("quarantine", tier.quarantine, _all_but_newest(tier.quarantine, old)),
    ):
        for name, info in found:
            if not is_lease_held():
                return
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=fd)
                yield reason, info.st_size


def _older(fd: int, ours: Callable[[str], object], than: float) -> Iterator[tuple[str, os.stat_result]]:
    with os.scandir(fd) as entries:
        for entry in entries:
            if not ours(entry.name):
                continue
            with contextlib.suppress(FileNotFoundError):
                info = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(info.st_mode) and info.st_mtime < than:
                    yield entry.name, info


def _all_but_newest(fd: int, than: float) -> Iterator[tuple[str, os.stat_result]]:
    """Quarantined blocks but for a few; by change time, which is when they were put there."""
    newest: list[tuple[float, str]] = []
    for name, info in _older(fd, _QUARANTINED.fullmatch, float("inf")):
        heapq.heappush(newest, (info.st_ctime, name))
        if len(newest) > _KEPT_IN_QUARANTINE:
            heapq.heappop(newest)
    kept = {name for _, name in newest}
    for name, info in _older(fd, _QUARANTINED.fullmatch, float("inf")):
        if name not in kept and info.st_ctime < than:
            yield name, info
