"""Count the tokens that requests loaded from the pool, by tier. Needs no vLLM."""

from __future__ import annotations

import collections
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvpool.protocol.wire import Tier

__all__ = ["RequestTokens"]

_MAX_REQUESTS = 1024
_GROUP_BYTES = 4  # at the end of an offload key: the number of its cache group, big-endian


class RequestTokens:
    """Tokens by tier, in total and for the last 1024 requests. Thread-safe.

    `tokens_per_block`: tokens of one offloaded block, for each cache group.
    """

    def __init__(self, tokens_per_block: Sequence[int]) -> None:
        self._tokens_per_block = tokens_per_block
        self._lock = threading.Lock()
        self._totals: collections.Counter[str] = collections.Counter()
        self._requests: collections.OrderedDict[str, dict[int, collections.Counter[str]]] = collections.OrderedDict()

    def add(
        self, request: str, offload_keys: Sequence[bytes], ok: Sequence[bool], tiers: Sequence[Tier]
    ) -> collections.Counter[str]:
        """Count the blocks that a job loaded. Return the growth in tokens by tier."""
        with self._lock:
            groups = self._requests.setdefault(request, {})
            before = _tokens_of(groups)
            for key, is_loaded, tier in zip(offload_keys, ok, tiers, strict=False):
                if is_loaded:
                    group = int.from_bytes(key[-_GROUP_BYTES:], "big")
                    size = self._tokens_per_block[min(group, len(self._tokens_per_block) - 1)]
                    groups.setdefault(group, collections.Counter())[tier.name.lower()] += size
            grown = _tokens_of(groups) - before
            self._totals += grown
            while len(self._requests) > _MAX_REQUESTS:
                self._requests.popitem(last=False)
        return grown

    def totals(self) -> dict[str, int]:
        """Return all tokens by tier."""
        return dict(self._totals)

    def by_request(self) -> dict[str, dict[str, int]]:
        """Return the tokens of the last requests by tier."""
        with self._lock:
            return {request: dict(_tokens_of(groups)) for request, groups in self._requests.items()}


def _tokens_of(groups: Mapping[int, collections.Counter[str]]) -> collections.Counter[str]:
    """Return the largest count of all cache groups: a token has a block in each group and counts once.

    Groups with a sliding window load only the end of a prefix.
    """
    most = max(groups.values(), key=lambda tokens: tokens.total(), default=None)
    return collections.Counter(most)
