"""Lookups of vLLM's requests, counted once for each request and block. Needs no vLLM.

A token has a block in each cache group; the group that was asked for the most tokens counts.
"""

from __future__ import annotations

import collections
import math
from typing import TYPE_CHECKING

from kvpool.protocol.wire import Tier
from kvpool.stats import Reason
from kvpool.transport.responses import LookupResult

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvpool.client import Client

__all__ = ["PoolLookups", "tokens_per_block"]

_GROUP_BYTES = 4  # at the end of an offload key: the number of its cache group, big-endian


def tokens_per_block(tokens_of_groups: Sequence[int]) -> int:
    """Return the unit of the counted blocks: the largest number of tokens that divides each group's."""
    return math.gcd(*tokens_of_groups)


class PoolLookups:
    """Source of a LookupTable. `client` returns the current client, None without the pool."""

    def __init__(
        self,
        client: Callable[[], Client | None],
        block_ids: Callable[[bytes, Sequence[bytes]], list[bytes]],
        tokens_of_groups: Sequence[int],
    ) -> None:
        self._client = client
        self._block_ids = block_ids
        self._tokens_of_groups = tokens_of_groups

    @property
    def wait_s(self) -> float:
        """How long an engine waits for a lookup."""
        client = self._client()
        return client.lookup_seconds if client is not None else 0.0

    def query(self, offload_keys: Sequence[bytes], deadline: float) -> LookupResult:
        """Look up blocks of one request. With several cache groups their keys are mixed, so each one is checked."""
        client = self._client()
        if client is None:
            return LookupResult([Tier.MISS] * len(offload_keys), Reason.CLOSED)
        exhaustive = len(self._tokens_of_groups) > 1
        return client.find(self._block_ids(client.fingerprint, offload_keys), deadline, exhaustive=exhaustive)

    def count(self, offload_keys: Sequence[bytes], hits: Sequence[bool], reason: Reason) -> None:
        """Count a request's new blocks as the engine sees them."""
        client = self._client()
        if client is None:
            return
        groups: collections.defaultdict[int, list[bool]] = collections.defaultdict(list)
        for key, hit in zip(offload_keys, hits, strict=True):
            groups[int.from_bytes(key[-_GROUP_BYTES:], "big")].append(hit)
        figures = [(self._units(group, len(found)), self._units(group, sum(found))) for group, found in groups.items()]
        asked, found = max(figures, key=lambda figure: (figure[0], -figure[1]), default=(0, 0))
        client.count_lookup(asked, found, reason)

    def _units(self, group: int, blocks: int) -> int:
        tokens = self._tokens_of_groups[min(group, len(self._tokens_of_groups) - 1)]
        return blocks * tokens // tokens_per_block(self._tokens_of_groups)
