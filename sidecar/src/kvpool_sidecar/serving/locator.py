"""Locates blocks in the tiers, under the keys of the requesting tenant and of the tenants it may read.

A block is found if any of these tenants has it. The nearest tier wins; within a tier, the requesting tenant's own key.
Without shared tenants every per-tenant loop runs once, so the common case costs nothing extra. Tiers are the numbers of
the wire protocol; messages are encoded in kvpool_sidecar.serving.messages.
"""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING, NamedTuple

from kvpool.protocol.wire import Tier

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpool_sidecar.index.resolver import BlockResolver
    from kvpool_sidecar.storage.base import Store
    from kvpool_sidecar.storage.shared.tier import SharedTier
    from kvpool_sidecar.tenancy.identity import Tenant

__all__ = ["BlockLocator", "Located", "first_local_key"]

_WINDOWS = (1, 16, 64)  # blocks in the first queries to the shared tier
_WINDOW = 256  # blocks in each further query
_PARTS = (64, 256, 1024)  # blocks of a prompt that are keyed in one step, because several keys per block take time
_ROUNDS = 3  # per tenant: a prompt may have parts of several tenants, each part at a peer


class Located(NamedTuple):
    """The tier of each block and its key there, at least up to the first miss."""

    tiers: bytes
    keys: Sequence[bytes]


def first_local_key(local: Store, tenants: Sequence[Tenant], block_id: bytes) -> bytes:
    """Return the first of the tenants' keys that is on this node; the requesting tenant's own key if none is."""
    own = tenants[0].block_key(block_id)
    if len(tenants) == 1 or local.contains(own):
        return own
    return next((key for other in tenants[1:] if local.contains(key := other.block_key(block_id))), own)


class BlockLocator:
    """Locates blocks. Thread-safe. Every call ends by its deadline; a block that was not found by then is a miss."""

    def __init__(self, local: Store, shared: SharedTier | None, peers: BlockResolver) -> None:
        self._local = local
        self._shared = shared
        self._peers = peers

    def is_local(self, block_key: bytes) -> bool:
        """Return whether a drive of this node has the block."""
        return self._local.contains(block_key)

    def locate(
        self, tenants: Sequence[Tenant], block_ids: Sequence[bytes], timeout_s: float, *, exhaustive: bool
    ) -> Located:
        """Return the tier and key of each block; unless `exhaustive`, all tiers are 0 after the first miss.

        `tenants`: the requesting tenant, then those it may read. The index is queried at most twice per tenant, for any
        number of blocks (BlockResolver.reach).
        """
        deadline = time.monotonic() + timeout_s
        if len(tenants) == 1 or exhaustive:
            return self._part(tenants, block_ids, deadline, exhaustive=exhaustive)
        tiers, keys = b"", list[bytes]()
        sizes = itertools.chain(_PARTS, itertools.repeat(len(block_ids)))
        while len(tiers) < len(block_ids) and Tier.MISS not in tiers:
            part = self._part(tenants, block_ids[len(tiers) : len(tiers) + next(sizes)], deadline, exhaustive=False)
            tiers += part.tiers
            keys += part.keys
        return Located(tiers.ljust(len(block_ids), b"\0"), keys)

    def _part(
        self, tenants: Sequence[Tenant], block_ids: Sequence[bytes], deadline: float, *, exhaustive: bool
    ) -> Located:
        keys = self._local_keys(tenants, block_ids, deadline)
        tiers = bytearray(Tier.LOCAL if present else Tier.MISS for present in self._local.contains_many(keys))
        rest = [n for n, tier in enumerate(tiers) if tier == Tier.MISS]
        has_shared = self._shared is not None and self._shared.available
        if rest and (left := deadline - time.monotonic()) > 0:
            budget = left / 2 if has_shared else left  # a slow index leaves time for the shared tier
            for n, key in self._at_peers(tenants, block_ids, rest, budget, exhaustive=exhaustive).items():
                tiers[n], keys[n] = Tier.PEER, key
        rest = [n for n in rest if tiers[n] == Tier.MISS]
        if rest and has_shared:
            rest = self._find_in_shared(tenants, block_ids, rest, tiers, keys, deadline, exhaustive=exhaustive)
        prefix = bytes(tiers) if exhaustive or not rest else bytes(tiers[: rest[0]]).ljust(len(tiers), b"\0")
        return Located(prefix, keys)

    def _local_keys(self, tenants: Sequence[Tenant], block_ids: Sequence[bytes], deadline: float) -> list[bytes]:
        """Return `first_local_key` of each block; after half of the time, for the requesting tenant only."""
        if len(tenants) == 1:
            return [tenants[0].block_key(block_id) for block_id in block_ids]
        until = (time.monotonic() + deadline) / 2
        return [
            first_local_key(self._local, tenants if time.monotonic() < until else tenants[:1], block_id)
            for block_id in block_ids
        ]

    def _at_peers(
        self,
        tenants: Sequence[Tenant],
        block_ids: Sequence[bytes],
        rest: Sequence[int],
        budget: float,
        *,
        exhaustive: bool,
    ) -> dict[int, bytes]:
        """Return the keys, by position, of those of `rest` that the index locates at a peer.

        Unless `exhaustive`, the tenants are queried in turn until none of them has the first missing block.
        """
        query = self._peers.locate if exhaustive else self._peers.longest_prefix
        until = time.monotonic() + budget
        located: dict[int, bytes] = {}
        missing, without_hit = list(rest), 0
        rounds = tenants if exhaustive or len(tenants) == 1 else itertools.chain.from_iterable([tenants] * _ROUNDS)
        for tenant in rounds:
            keys = [tenant.block_key(block_ids[n]) for n in missing if tenant is tenants[0] or time.monotonic() < until]
            left = until - time.monotonic()
            if not keys or left <= 0:
                break
            there: Sequence[object] = query(keys, left)
            located.update((n, key) for n, key, present in zip(missing, keys, there, strict=False) if present)
            without_hit = 0 if there[0] else without_hit + 1
            missing = [n for n in missing if n not in located]
            if without_hit >= len(tenants) and not exhaustive:
                break
        return located

    def _find_in_shared(
        self,
        tenants: Sequence[Tenant],
        block_ids: Sequence[bytes],
        rest: list[int],
        tiers: bytearray,
        keys: list[bytes],
        deadline: float,
        *,
        exhaustive: bool,
    ) -> list[int]:
        """Return those of `rest` that are still missing. Unless `exhaustive`, stop at the first miss."""
        missing: list[int] = []
        at = 0
        # an unknown prompt costs one query to the file system, not a window of them
        for size in itertools.chain(() if exhaustive else _WINDOWS, itertools.repeat(_WINDOW)):
            chunk = rest[at : at + size]
            if not chunk or deadline - time.monotonic() <= 0 or (missing and not exhaustive):
                break
            at += len(chunk)
            for tenant in tenants:
                chunk = self._query_shared(tenant, block_ids, chunk, tiers, keys, deadline)
            missing += chunk
        return missing + rest[at:]

    def _query_shared(
        self,
        tenant: Tenant,
        block_ids: Sequence[bytes],
        chunk: list[int],
        tiers: bytearray,
        keys: list[bytes],
        deadline: float,
    ) -> list[int]:
        """Return those of `chunk` that the shared tier does not have under this tenant's keys."""
        assert self._shared is not None  # noqa: S101
        keys_there = [tenant.block_key(block_ids[n]) for n in chunk if time.monotonic() < deadline]
        left = deadline - time.monotonic()
        if not keys_there or left <= 0:
            return chunk
        for n, key, present in zip(chunk, keys_there, self._shared.contains_many(keys_there, left), strict=False):
            if present:
                tiers[n], keys[n] = Tier.SHARED, key
        return [n for n in chunk if tiers[n] == Tier.MISS]
