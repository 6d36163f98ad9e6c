"""Where blocks are, under the names of the asking tenant and of those it may read. No wire formats here.

A block is found if it is there for any of them; the nearest place counts, and at one place the asker's own first. Who
may read nobody else asks what it always asked: all that is here for others is loops of one turn then.
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

__all__ = ["BlockLocator", "Located", "nearest"]

_WINDOWS = (1, 16, 64)  # the first questions to the shared tier
_WINDOW = 256  # and all further ones
_PARTS = (64, 256, 1024)  # of a prompt, where there are several names for each block: naming them all takes long
_TURNS = 3  # for each tenant: prompts of parts of several tenants, each part at a peer


class Located(NamedTuple):
    """The tier of each block, and the key under which it is there, at least up to the first miss."""

    tiers: bytes
    keys: Sequence[bytes]


def nearest(local: Store, tenants: Sequence[Tenant], block_id: bytes) -> bytes:
    """The first of its keys that is on this node; the own one if none is."""
    own = tenants[0].block_key(block_id)
    if len(tenants) == 1 or local.contains(own):
        return own
    return next((key for other in tenants[1:] if local.contains(key := other.block_key(block_id))), own)


class BlockLocator:
    """Thread-safe. Every call ends by its deadline; what could not be found out by then is a miss."""

    def __init__(self, local: Store, shared: SharedTier | None, peers: BlockResolver) -> None:
        self._local = local
        self._shared = shared
        self._peers = peers

    def locate(
        self, tenants: Sequence[Tenant], block_ids: Sequence[bytes], timeout_s: float, *, every: bool
    ) -> Located:
        """The tier of each block; all 0 after the first miss unless `every`. `tenants`: the asking one first.

        The index is asked at most twice for one tenant's names, whatever the number of blocks: BlockResolver.reach.
        """
        deadline = time.monotonic() + timeout_s
        if len(tenants) == 1 or every:
            return self._part(tenants, block_ids, deadline, every=every)
        tiers, keys = b"", list[bytes]()
        sizes = itertools.chain(_PARTS, itertools.repeat(len(block_ids)))
        while len(tiers) < len(block_ids) and Tier.MISS not in tiers:
            found = self._part(tenants, block_ids[len(tiers) : len(tiers) + next(sizes)], deadline, every=False)
            tiers += found.tiers
            keys += found.keys
        return Located(tiers.ljust(len(block_ids), b"\0"), keys)

    def _part(self, tenants: Sequence[Tenant], block_ids: Sequence[bytes], deadline: float, *, every: bool) -> Located:
        keys = self._nearest(tenants, block_ids, deadline)
        tiers = bytearray(Tier.LOCAL if self._local.contains(key) else Tier.MISS for key in keys)
        rest = [n for n, tier in enumerate(tiers) if tier == Tier.MISS]
        has_shared = self._shared is not None and self._shared.available
        if rest and (left := deadline - time.monotonic()) > 0:
            budget = left / 2 if has_shared else left  # a slow index leaves time to ask the shared tier
            for n, key in self._at_peers(tenants, block_ids, rest, budget, every=every).items():
                tiers[n], keys[n] = Tier.PEER, key
        rest = [n for n in rest if tiers[n] == Tier.MISS]
        if rest and has_shared:
            rest = self._look_in_shared(tenants, block_ids, rest, tiers, keys, deadline, every=every)
        found = bytes(tiers) if every or not rest else bytes(tiers[: rest[0]]).ljust(len(tiers), b"\0")
        return Located(found, keys)

    def _nearest(self, tenants: Sequence[Tenant], block_ids: Sequence[bytes], deadline: float) -> list[bytes]:
        """`nearest` of each; of the asker alone when half of the time is gone, for naming blocks takes time, too."""
        if len(tenants) == 1:
            return [tenants[0].block_key(block_id) for block_id in block_ids]
        until = (time.monotonic() + deadline) / 2
        return [nearest(self._local, tenants if time.monotonic() < until else tenants[:1], i) for i in block_ids]

    def _at_peers(
        self, tenants: Sequence[Tenant], block_ids: Sequence[bytes], rest: Sequence[int], budget: float, *, every: bool
    ) -> dict[int, bytes]:
        """Which of `rest` are said to be at a peer, under which key.

        Without `every` tenants take turns at what is missing until none of them has the first block that is.
        """
        ask = self._peers.locate if every else self._peers.longest_prefix
        until = time.monotonic() + budget
        found: dict[int, bytes] = {}
        missing, in_vain = list(rest), 0
        turns = tenants if every or len(tenants) == 1 else itertools.chain.from_iterable([tenants] * _TURNS)
        for tenant in turns:
            keys = [tenant.block_key(block_ids[n]) for n in missing if tenant is tenants[0] or time.monotonic() < until]
            left = until - time.monotonic()
            if not keys or left <= 0:
                break
            there: Sequence[object] = ask(keys, left)
            found.update((n, key) for n, key, is_there in zip(missing, keys, there, strict=False) if is_there)
            in_vain = 0 if there[0] else in_vain + 1
            missing = [n for n in missing if n not in found]
            if in_vain >= len(tenants) and not every:
                break
        return found

    def _look_in_shared(
        self,
        tenants: Sequence[Tenant],
        block_ids: Sequence[bytes],
        rest: list[int],
        tiers: bytearray,
        keys: list[bytes],
        deadline: float,
        *,
        every: bool,
    ) -> list[int]:
        """What is still missing of `rest`. Unless `every`, the search ends with the first block that is nowhere."""
        missing: list[int] = []
        at = 0
        # a prompt that nobody has seen costs one question to the file system, not a window of them
        for size in itertools.chain(() if every else _WINDOWS, itertools.repeat(_WINDOW)):
            chunk = rest[at : at + size]
            if not chunk or deadline - time.monotonic() <= 0 or (missing and not every):
                break
            at += len(chunk)
            for tenant in tenants:
                chunk = self._ask_shared(tenant, block_ids, chunk, tiers, keys, deadline)
            missing += chunk
        return missing + rest[at:]

    def _ask_shared(
        self,
        tenant: Tenant,
        block_ids: Sequence[bytes],
        chunk: list[int],
        tiers: bytearray,
        keys: list[bytes],
        deadline: float,
    ) -> list[int]:
        """Those of `chunk` that are not there under this tenant's names."""
        assert self._shared is not None  # noqa: S101
        its = [tenant.block_key(block_ids[n]) for n in chunk if time.monotonic() < deadline]
        left = deadline - time.monotonic()
        if not its or left <= 0:
            return chunk
        for n, key, is_there in zip(chunk, its, self._shared.contains_many(its, left), strict=False):
            if is_there:
                tiers[n], keys[n] = Tier.SHARED, key
        return [n for n in chunk if tiers[n] == Tier.MISS]
