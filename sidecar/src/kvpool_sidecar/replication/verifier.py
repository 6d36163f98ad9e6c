"""Looks at blocks that a client found corrupt, wherever they are: a client's word takes no block out of service."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import OrderedDict
from typing import TYPE_CHECKING

from kvpool.errors import KVPoolError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpool_sidecar.counters import Stats
    from kvpool_sidecar.index.base import NodeInfo
    from kvpool_sidecar.index.resolver import BlockResolver
    from kvpool_sidecar.peers.connection import PeerConnection
    from kvpool_sidecar.storage.base import Store
    from kvpool_sidecar.storage.shared.tier import SharedTier

__all__ = ["BlockVerifier"]

log = logging.getLogger(__name__)

_MAX_QUEUED = 256
_FOUND_GOOD_S = 60.0
_PEER_TIMEOUT_S = 5.0


class BlockVerifier:
    """One thread, a bounded queue. A block that was found good is not read again for a minute, whoever complains."""

    def __init__(
        self,
        local: Store,
        shared: SharedTier | None,
        peers: BlockResolver,
        dial: Callable[[NodeInfo, float], PeerConnection],
        stats: Stats,
    ) -> None:
        self._local = local
        self._shared = shared
        self._peers = peers
        self._dial = dial
        self._stats = stats
        self._queue: queue.Queue[bytes | None] = queue.Queue(_MAX_QUEUED)
        self._verified: OrderedDict[bytes, float] = OrderedDict()

    def start(self) -> None:
        threading.Thread(target=self._run, name="inspector", daemon=True).start()

    def stop(self) -> None:
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)

    def report(self, key: bytes) -> None:
        """Somebody says that this block is corrupt."""
        try:
            self._queue.put_nowait(key)
        except queue.Full:
            self._stats.add("reports", "dropped")

    def _run(self) -> None:
        while (key := self._queue.get()) is not None:
            now = time.monotonic()
            if self._verified.get(key, 0.0) > now:
                continue
            self._verified[key] = now + _FOUND_GOOD_S
            if len(self._verified) > _MAX_QUEUED:
                self._verified.popitem(last=False)
            try:
                self._verify(key)
            except Exception:
                log.exception("looking at a reported block")

    def _verify(self, key: bytes) -> None:
        self._stats.add("reports", "checked")
        if self._local.contains(key) and not self._local.verify(key):
            self._stats.add("reports", "corrupt")
        if self._shared is not None and self._shared.contains_many([key], 1.0)[0] and not self._shared.verify(key):
            self._stats.add("reports", "corrupt")
        found = self._peers.locate([key], 1.0)[0]
        if found is None:
            return
        try:
            link = self._dial(found.peer, _PEER_TIMEOUT_S)
        except (KVPoolError, OSError):
            return
        try:
            link.request([key], verify=True)  # the peer checks its own copy, and quarantines it
            if link.response_size(time.monotonic() + _PEER_TIMEOUT_S) == 0:
                self._stats.add("reports", "corrupt")
                self._peers.blacklist(key, found.number)
        except (KVPoolError, OSError):
            self._peers.blacklist(key, found.number)
        finally:
            link.close()
