"""Whether replacing the sidecars now would keep what is cached: condition RollingUpdateSafe. Pure.

A sidecar that is replaced finds its blocks on its drives again, and the index knows them all the time: its entries name
the node's number and the drive's generation, which stay. Some things break that, and each has its reason here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvpool_operator.api.reasons import Reason
from kvpool_operator.text import summarize_clauses

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpool_operator.api.v1alpha1 import KVCachePool
    from kvpool_operator.observe.snapshot import Sidecar
    from kvpool_operator.sidecars.status import SidecarStatus

__all__ = ["BLOCK_FORMATS", "rolling_update_safe"]

BLOCK_FORMATS: Final = (1, 2, 3)
"""Versions of the block format that the sidecars of this release read (kvpool.protocol.block)."""
_NAMED: Final = 3
_NEWS: Final = 256  # blocks that a sidecar announces in one go


def rolling_update_safe(
    pool: KVCachePool, sidecars: Sequence[Sidecar], desired: int, *, index_is_ready: bool
) -> tuple[bool | None, Reason, str]:
    """Verdict, reason and sentence. `desired`: nodes that should carry a sidecar."""
    known = [(s.node or "a node", s.report) for s in sidecars if s.report is not None]
    if not known:
        return None, Reason.STATUS_UNAVAILABLE, "no sidecar has told yet what it holds"
    away = sorted(s.node or "a node" for s in sidecars if not s.ready or s.report is None)
    if away or len(sidecars) < desired:
        who = summarize_clauses(away, _NAMED) or f"{desired - len(sidecars)} nodes"
        return False, Reason.NODES_NOT_READY, f"{who}: not ready; a roll would take further nodes away"
    strange = sorted(node for node, r in known if set(r.block_formats) - set(BLOCK_FORMATS))
    if strange:
        told = f"{summarize_clauses(strange, _NAMED)}: sidecars that know newer blocks than those of this release"
        return False, Reason.FORMAT_UNKNOWN, f"{told}; what they wrote in the newer format would be misses"
    if not index_is_ready:
        told = "the index is not there, so nodes that come back could not be found by their peers"
        return False, Reason.INDEX_NOT_RUNNING, told
    behind = sorted(node for node, r in known if _is_behind(r))
    if behind:
        return (
            False,
            Reason.INDEX_NOT_SYNCED,
            f"the index does not know all blocks of these nodes yet: {summarize_clauses(behind, _NAMED)}",
        )
    # no numbers that change all the time: a condition's message is written at once
    at_once = pool.spec.nodes.update.max_unavailable
    told = f"blocks stay on their drives and in the index while sidecars are replaced, {at_once} at a time"
    return True, Reason.CACHE_PRESERVED, told


def _is_behind(report: SidecarStatus) -> bool:
    """Blocks come and go all the time: a tenth of them may be on its way."""
    return not report.scanned or report.index_announced < report.blocks - report.blocks // 10 - _NEWS
