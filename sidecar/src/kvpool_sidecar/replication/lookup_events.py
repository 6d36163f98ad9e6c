"""What follows a lookup, off its path: a thread that tells others which blocks of a prompt were found.

The queue is short; what does not fit is left out. For listeners only the blocks before the first miss count, and of a
long prompt the first `MAX_BLOCKS`; what learns the order of blocks hears of `MAX_SEQUENCE`, found or not.
"""

from __future__ import annotations

import collections
import logging
import threading
import time
from typing import TYPE_CHECKING, NamedTuple, Protocol

from kvpool.protocol.wire import Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvpool_sidecar.counters import Stats
    from kvpool_sidecar.tenancy.identity import Tenant

__all__ = ["MAX_BLOCKS", "MAX_SEQUENCE", "LookupEvents", "LookupListener"]

log = logging.getLogger(__name__)

MAX_BLOCKS = 256
MAX_SEQUENCE = 1280
_MAX_QUEUED = 64


class LookupListener(Protocol):
    """`tenant` that asked, `keys` in the prompt's order, the tier of each, when the answer went out (monotonic).

    Keys may be another tenant's that this one may read. Must not block.
    """

    def __call__(self, tenant: bytes, keys: Sequence[bytes], tiers: bytes, asked_at: float, /) -> None: ...


class _Lookup(NamedTuple):
    tenant: Tenant
    block_ids: list[bytes]
    found: list[bytes]  # keys, as many as tiers
    tiers: bytes
    at: float


class LookupEvents:
    """Thread-safe."""

    def __init__(
        self,
        listeners: Sequence[LookupListener],
        stats: Stats,
        learn: Callable[[Sequence[bytes], bytes], None] | None = None,
    ) -> None:
        self._observe_sequence = learn
        self._listeners = listeners
        self._stats = stats
        self._queue: collections.deque[_Lookup] = collections.deque()
        self._ready = threading.Condition()
        self._stopping = False

    def start(self) -> None:
        threading.Thread(target=self._run, name="after-lookup", daemon=True).start()

    def stop(self) -> None:
        """What is queued is forgotten."""
        with self._ready:
            self._stopping = True
            self._ready.notify_all()

    @property
    def queued(self) -> int:
        with self._ready:
            return len(self._queue)

    def publish(self, tenant: Tenant, block_ids: Sequence[bytes], tiers: bytes, keys: Sequence[bytes]) -> None:
        """These were just looked up, `tiers` was the answer, found under `keys` (at least up to the first miss).

        Returns at once.
        """
        promised = tiers.find(Tier.MISS)
        count = min(len(tiers) if promised < 0 else promised, MAX_BLOCKS)
        kept = count if self._observe_sequence is None else min(len(block_ids), MAX_SEQUENCE)
        if not kept:
            return
        with self._ready:
            if len(self._queue) < _MAX_QUEUED:
                found = list(keys[:count])
                self._queue.append(_Lookup(tenant, list(block_ids[:kept]), found, tiers[:count], time.monotonic()))
                self._ready.notify()
                return
        self._stats.add("prefetch", "dropped", count)

    def _run(self) -> None:
        while True:
            with self._ready:
                while not self._queue and not self._stopping:
                    self._ready.wait()
                if self._stopping:
                    return
                answer = self._queue.popleft()
            try:
                if answer.tiers:
                    for listener in self._listeners:
                        listener(answer.tenant.tag, answer.found, answer.tiers, answer.at)
                if (
                    self._observe_sequence is not None
                ):  # its own alone: nobody says in which order another tenant's blocks go
                    self._observe_sequence(
                        [answer.tenant.block_key(block_id) for block_id in answer.block_ids], answer.tenant.tag
                    )
            except Exception:
                log.exception("after a lookup")
