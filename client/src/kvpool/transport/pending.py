"""Blocks of one batch while they are transferred, and what each of them must match."""

from __future__ import annotations

import collections
import os
import threading
import time
from typing import TYPE_CHECKING

from kvpool.errors import KVPoolError
from kvpool.protocol import block
from kvpool.stats import Reason
from kvpool.transport.descriptor_closer import close_later
from kvpool.transport.piece_size import PieceSize

if TYPE_CHECKING:
    from kvpool.protocol import wire

__all__ = ["Batch", "Expectation", "PeerMissError", "PendingRead", "PendingWrite"]


class PeerMissError(KVPoolError):
    """The index named a peer that no longer has the block."""


class Expectation:
    """Required header fields of every block on a connection; the tenant is `tenant_tag` or one of `readable`."""

    __slots__ = ("fingerprint", "readable", "tenant_tag", "verify")

    def __init__(
        self, fingerprint: bytes, tenant_tag: bytes, *, verify: bool, readable: tuple[bytes, ...] = ()
    ) -> None:
        self.fingerprint = fingerprint
        self.tenant_tag = tenant_tag
        self.readable = readable
        self.verify = verify  # False: the sidecar verifies payloads (Flag.VERIFY)


class Batch:
    """Blocks that one caller waits for together. Thread-safe."""

    def __init__(self, deadline: float, pieces: PieceSize | None = None) -> None:
        self.deadline = deadline
        self.pieces = pieces or PieceSize()
        self.closed = False
        self.is_warm = False  # the last block of this node that was asked for was in the page cache
        self.ready: collections.deque[PendingRead] = collections.deque()  # probably readable without blocking
        self.cold: collections.deque[PendingRead] = collections.deque()  # may block on a drive: worker threads only
        self._pending = 0
        self._condition = threading.Condition()

    def expect(self, count: int) -> None:
        """Add `count` pending blocks."""
        with self._condition:
            self._pending += count

    def settle(self, count: int = 1) -> None:
        """Mark `count` blocks as done, successfully or not."""
        with self._condition:
            self._pending -= count
            if self._pending <= 0:
                self._condition.notify_all()

    def wait(self) -> bool:
        """Wait until no block is pending. Return False at the deadline."""
        with self._condition:
            while self._pending > 0:
                remaining = self.deadline - time.monotonic()
                if remaining <= 0 or not self._condition.wait(remaining):
                    return self._pending <= 0
        return True


class PendingRead:
    """One block being read into a buffer (`view`: writable bytes of the payload's exact length)."""

    __slots__ = (
        "block_id",
        "block_key",
        "cold",
        "descriptor",
        "done",
        "filled",
        "gate",
        "header",
        "hot",
        "offset",
        "ok",
        "payload_sum",
        "position",
        "reason",
        "stream",
        "sum",
        "tier",
        "view",
    )

    def __init__(
        self,
        position: int,
        block_id: bytes,
        block_key: bytes,
        tier: wire.Tier,
        view: memoryview,
        payload_sum: bytes = b"",
    ) -> None:
        self.position = position
        self.block_id = block_id
        self.block_key = block_key
        self.tier = tier
        self.payload_sum = payload_sum  # of an earlier read's header: the header is not read again
        self.view = view
        self.descriptor = -1  # of the block's file, or -1
        self.hot: object = None  # what kvpool.transport.hot_blocks knows of it
        self.stream = -1  # number of the peer stream that delivers it, or -1
        self.gate = threading.Lock()
        self.header = b"" if payload_sum else bytearray(block.HEADER_BYTES)
        self.offset = 0
        self.cold = False  # its file was not in the page cache
        self.filled = 0  # bytes of a cold file that were brought there since
        self.sum: block.RunningChecksum | None = None
        self.ok = False
        self.done = 0.0  # time.monotonic() when it was complete and verified
        self.reason = Reason.NONE

    def close(self) -> None:
        """Close the block's descriptor in the background; safe to call twice."""
        close_later((self.take_descriptor(),), self.tier)

    def take_descriptor(self) -> int:
        """Return the block's descriptor, which the caller must close; -1 if it is taken or closed already."""
        descriptor, self.descriptor = self.descriptor, -1
        return descriptor


class PendingWrite:
    """One block being written from a buffer to an unnamed file; `engine_block` and `salt_tag` go into its header."""

    __slots__ = (
        "block_id",
        "block_key",
        "descriptor",
        "engine_block",
        "ok",
        "position",
        "reason",
        "salt_tag",
        "token",
        "view",
    )

    def __init__(self, position: int, block_id: bytes, block_key: bytes, token: int, view: memoryview) -> None:
        self.position = position
        self.block_id = block_id
        self.block_key = block_key
        self.token = token
        self.view = view
        self.engine_block: block.EngineBlock | None = None
        self.salt_tag = block.NO_SALT
        self.descriptor = -1
        self.ok = False
        self.reason = Reason.NONE

    def close(self) -> None:
        """Close the file's descriptor immediately, in a thread that may wait; safe to call twice."""
        descriptor = self.take_descriptor()
        if descriptor >= 0:
            os.close(descriptor)

    def take_descriptor(self) -> int:
        """Return the file's descriptor, which the caller must close; -1 if it is taken or closed already."""
        descriptor, self.descriptor = self.descriptor, -1
        return descriptor
