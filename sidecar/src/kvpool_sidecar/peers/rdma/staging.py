"""The serving side: blocks in registered memory, for as long as a peer reads them.

What is staged is bounded and stays until the peer says that it has read it, or for LONGEST_S. It must not go earlier,
not even with the connection: the peer's device may still be reading, and would bring it bytes of another tenant's
block. For the same reason the peer believes no read that took nearly so long (`fetch`).
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from typing import TYPE_CHECKING, NamedTuple

from kvpool.protocol.block import HEADER_BYTES
from kvpool.protocol.peer_wire import PeerStatus
from kvpool_sidecar.peers.rdma.arena import Arena

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpool_sidecar.peers.rdma.agent import NixlAgent
    from kvpool_sidecar.storage.base import Store

__all__ = ["LONGEST_S", "Staged", "Staging", "StagingLease"]

LONGEST_S = 15.0
_MAX_STAGED = 4096


class Staged(NamedTuple):
    """A block file in memory that the peer may read: `address` and `size` in bytes, `token` to release it."""

    address: int
    size: int
    token: int


class Staging:
    """Thread-safe. `capacity` bytes are registered once, at the first use."""

    def __init__(
        self, agent: NixlAgent, store: Store, capacity: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._agent = agent
        self._store = store
        self._clock = clock
        self._lock = threading.Lock()
        self._memory = mmap.mmap(-1, capacity)
        self._view = memoryview(self._memory)
        self._arena = Arena(capacity)
        self._address, self._registration = agent.register(self._memory)
        self._staged: dict[int, tuple[int, float]] = {}  # token: offset, until when
        self._last = 0

    def metadata(self) -> bytes:
        """For a peer that wants to read."""
        return self._agent.metadata()

    def lease(self) -> StagingLease:
        """What one peer connection has staged."""
        return StagingLease(self)

    def stage(self, key: bytes) -> Staged | PeerStatus:
        """The block in memory; MISS if it is not here, BUSY if there is no room now."""
        found = self._store.open(key)
        if found is None:
            return PeerStatus.MISS
        size = HEADER_BYTES + found.payload_len
        try:
            offset = self._allocate(size)
            if offset is None:
                return PeerStatus.BUSY
            done = 0
            while done < size:
                n = os.preadv(found.fd, [self._view[offset + done : offset + size]], done)
                if n == 0:
                    break
                done += n
        finally:
            os.close(found.fd)
        with self._lock:
            if done < size:  # shorter than it says: not a block any more
                self._arena.free(offset)
                return PeerStatus.MISS
            self._last += 1
            self._staged[self._last] = offset, self._clock() + LONGEST_S
            return Staged(self._address + offset, size, self._last)

    def release(self, token: int) -> None:
        """The peer has read it, or is gone."""
        with self._lock:
            offset, _ = self._staged.pop(token, (None, 0.0))
            if offset is not None:
                self._arena.free(offset)

    @property
    def staged(self) -> int:
        """How many blocks are staged."""
        return len(self._staged)

    def _allocate(self, size: int) -> int | None:
        with self._lock:
            offset = self._arena.allocate(size) if len(self._staged) < _MAX_STAGED else None
            if offset is None:
                now = self._clock()
                for token in [t for t, (_, until) in self._staged.items() if until <= now]:
                    self._arena.free(self._staged.pop(token)[0])
                offset = self._arena.allocate(size) if len(self._staged) < _MAX_STAGED else None
            return offset


class StagingLease:
    """Of one peer connection, used by its thread: no connection can release what another one staged."""

    def __init__(self, staging: Staging) -> None:
        self._staging = staging
        self._tokens: set[int] = set()

    def metadata(self) -> bytes:
        """See Staging."""
        return self._staging.metadata()

    def stage(self, key: bytes) -> Staged | PeerStatus:
        """See Staging."""
        staged = self._staging.stage(key)
        if isinstance(staged, Staged):
            self._tokens.add(staged.token)
        return staged

    def release(self, token: int) -> None:
        """Only what this connection staged; anything else is ignored."""
        if token in self._tokens:
            self._tokens.discard(token)
            self._staging.release(token)
