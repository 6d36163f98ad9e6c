"""Why a block is not found: what this node removed, peers that cannot be reached, or blocks that were never stored.

Only the requesting tenant's own keys, and those it is granted to read, are examined: whether another tenant has a block
is never disclosed, not even in a counter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvpool.protocol.wire import MissCause, OpenStatus

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpool.protocol.wire import ClientHello
    from kvpool_sidecar.counters import Stats
    from kvpool_sidecar.index.resolver import BlockResolver
    from kvpool_sidecar.serving.fingerprints import Fingerprints
    from kvpool_sidecar.serving.opener import OpenResult
    from kvpool_sidecar.storage.base import Store
    from kvpool_sidecar.storage.removed_blocks import Removal, RemovedBlocks
    from kvpool_sidecar.tenancy.identity import Tenant

__all__ = ["AGES", "MissCauses", "age_label"]

AGES: Final = {"minute": 60, "ten-minutes": 600, "hour": 3600, "six-hours": 6 * 3600, "day": 24 * 3600}
"""Ranges of the time since a removal, with their exclusive upper bounds in seconds."""
_OLDER: Final = "older"
_LATE_SHARE: Final = 0.45  # of the timeout; the index alone may use half of it
_OF_REMOVALS: Final = {
    "capacity": MissCause.EVICTED_CAPACITY,
    "space": MissCause.EVICTED_SPACE,
    "memory": MissCause.EVICTED_CAPACITY,
    "quota": MissCause.EVICTED_QUOTA,
    "expired": MissCause.EXPIRED,
    "purged": MissCause.PURGED,
    "quarantined": MissCause.QUARANTINED,
}


def age_label(seconds: float) -> str:
    """Return the range of AGES; `older` above all."""
    return next((label for label, bound in AGES.items() if seconds < bound), _OLDER)


class MissCauses:
    """Explains misses. Thread-safe; no call waits for the index, a drive or a peer."""

    def __init__(
        self,
        local: Store,
        resolver: BlockResolver,
        removed: RemovedBlocks,
        fingerprints: Fingerprints,
        stats: Stats,
    ) -> None:
        self._local = local
        self._resolver = resolver
        self._removed = removed
        self._fingerprints = fingerprints
        self._stats = stats

    def of_lookup(
        self,
        hello: ClientHello,
        tenants: Sequence[Tenant],
        ungranted: Sequence[Tenant],
        block_id: bytes,
        used_share: float,
    ) -> MissCause:
        """Explain the first missing block of a lookup.

        `ungranted`: tenants that this client could read if it were newer; `used_share`: of the timeout.
        """
        keys = [tenant.block_key(block_id) for tenant in tenants]
        removal = self._removal(keys)
        if removal is not None:
            self._stats.add("removed_misses", age_label(removal.age_s))
        cause = self._cause(keys, removal, late=used_share > _LATE_SHARE)
        if cause is not MissCause.NEVER_STORED:
            return cause
        if any(self._local.contains(tenant.block_key(block_id)) for tenant in ungranted):
            return MissCause.GRANT_UNUSED
        if self._fingerprints.has_only_others(hello, tenants[0].tag):
            return MissCause.FINGERPRINT_DIFFERS
        return cause

    def of_open(
        self, tenants: Sequence[Tenant], block_ids: Sequence[bytes], results: Sequence[OpenResult], used_share: float
    ) -> list[OpenResult]:
        """Return the entries of an OPEN reply with the cause of each miss that has none yet."""
        late = used_share > _LATE_SHARE
        explained = []
        for block_id, entry in zip(block_ids, results, strict=True):
            if entry.status == OpenStatus.MISS and not entry.why:
                keys = [tenant.block_key(block_id) for tenant in tenants]
                entry = entry._replace(why=self._cause(keys, self._removal(keys), late=late))
            explained.append(entry)
        return explained

    def _removal(self, keys: Sequence[bytes]) -> Removal | None:
        return next((removal for key in keys if (removal := self._removed.find(key)) is not None), None)

    def _cause(self, keys: Sequence[bytes], removal: Removal | None, *, late: bool) -> MissCause:
        if any(self._resolver.is_unreachable(key) for key in keys):
            return MissCause.PEER_UNREACHABLE
        if late:
            return MissCause.DEADLINE
        if removal is not None:
            return _OF_REMOVALS[removal.cause]
        return MissCause.NEVER_STORED if self._resolver.available else MissCause.INDEX_UNAVAILABLE
