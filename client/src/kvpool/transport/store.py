"""Store a batch of blocks: BEGIN returns unnamed files, writer threads fill them, COMMIT names them.

An abandoned store leaves nothing behind: its file has no name, and its token expires with the connection.
"""

from __future__ import annotations

import collections
import contextlib
import enum
import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from kvpool.errors import DeadlineExceededError, ProtocolError
from kvpool.protocol import keys, wire
from kvpool.protocol.router_blocks import NO_ROUTER_BLOCKS
from kvpool.stats import Reason
from kvpool.transport import block_writer, pending
from kvpool.transport import responses as responses
from kvpool.transport.descriptor_closer import close_later

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpool.protocol.block import EngineBlock
    from kvpool.transport.connection import Connection
    from kvpool.transport.responses import BlockRequest
    from kvpool.transport.worker_pool import WorkerPool

__all__ = ["StoreBatch", "StoreOutcome"]

_log = logging.getLogger("kvpool")

_WINDOW_BYTES = 512 << 20  # of unnamed files that exist at the same time


class StoreOutcome(str, enum.Enum):
    """Successful outcomes of a store. The values are stable: they are label values of metrics."""

    STORED = "stored"  # written by this call
    HAVE = "have"  # the pool already had the block

    __str__ = str.__str__


class StoreBatch:
    """One call of `Client.put_from`. `outcome[position]` is a StoreOutcome or a Reason.

    `engine_blocks` are written into the blocks' headers if the pool publishes events, tags of `salts` if it requests
    them; empty: no block has one.
    """

    def __init__(
        self,
        deadline: float,
        workers: WorkerPool,
        engine_blocks: Sequence[EngineBlock | None] = (),
        salts: Sequence[str | None] = (),
    ) -> None:
        self.outcome: dict[int, StoreOutcome | Reason] = {}
        self.deadline = deadline
        self._workers = workers
        self._engine_blocks = engine_blocks
        self._salts = salts

    def run(self, connection: Connection, expect: pending.Expectation, wanted: Sequence[BlockRequest]) -> bool:
        """Store all blocks. Return False if the deadline expired first."""
        for window in self._windows(wanted, connection.server.max_block_bytes):
            stores = self._begin(connection, window)
            if not self._write(connection, expect, stores):
                return False
            self._commit(connection, expect, stores)
        return True

    def _windows(self, wanted: Sequence[BlockRequest], limit: int) -> list[list[BlockRequest]]:
        windows: list[list[BlockRequest]] = []
        room = 0
        for request in wanted:
            size = len(request.view)
            if size > limit:
                self.outcome[request.position] = Reason.REFUSED
                continue
            if size > room or len(windows[-1]) == wire.MAX_BATCH:
                windows.append([])
                room = max(_WINDOW_BYTES, size)
            windows[-1].append(request)
            room -= size
        return windows

    def _begin(self, connection: Connection, window: Sequence[BlockRequest]) -> list[pending.PendingWrite]:
        reply = connection.request(
            wire.Op.BEGIN,
            b"".join(wire.BEGIN_REQUEST.pack(request.block_id, len(request.view)) for request in window),
            count=len(window),
            deadline=self.deadline,
            max_descriptors=len(window),
        )
        try:
            settled, stores = responses.begun_stores(reply, window)
        except BaseException:
            connection.broken = True
            raise
        for position, status in settled:
            self.outcome[position] = StoreOutcome.HAVE if status == wire.BeginStatus.HAVE else Reason.REFUSED
        if self._engine_blocks and connection.server.events:
            for store in stores:
                store.engine_block = _requested(self._engine_blocks[store.position], connection.server)
        if self._salts and connection.server.salt_key:
            for store in stores:
                if salt := self._salts[store.position]:
                    store.salt_tag = keys.salt_tag(connection.server.salt_key, keys.salt_digest(salt))
        return stores

    def _write(self, connection: Connection, expect: pending.Expectation, stores: list[pending.PendingWrite]) -> bool:
        batch = pending.Batch(self.deadline)
        batch.expect(len(stores))
        waiting = collections.deque(stores)

        def drain() -> None:
            with contextlib.suppress(IndexError):
                while True:
                    store = waiting.popleft()
                    _write_one(store, batch, expect)
                    batch.settle()

        try:
            for _ in range(min(self._workers.limit, len(stores))):
                self._workers.submit(drain)
            done = batch.wait()
        finally:
            batch.closed = True
            with contextlib.suppress(IndexError):
                while True:
                    close_later((waiting.popleft().take_descriptor(),), wire.Tier.LOCAL)
        for store in stores:
            if not store.ok:
                self.outcome[store.position] = store.reason or Reason.DEADLINE
                connection.broken = True  # invalidate the token: a writer may still hold the file
        return done

    def _commit(self, connection: Connection, expect: pending.Expectation, stores: list[pending.PendingWrite]) -> None:
        written = [store for store in stores if store.ok]
        if not written:
            return
        reply = connection.request(
            wire.Op.COMMIT,
            b"".join(store.token.to_bytes(4, "little") for store in written),
            count=len(written),
            flags=wire.Flag.NONE if expect.verify else wire.Flag.VERIFY,
            deadline=self.deadline,
        )
        try:
            statuses = responses.commit_statuses(reply, len(written))
        except ProtocolError:
            connection.broken = True
            raise
        outcomes: dict[int, StoreOutcome] = {
            wire.CommitStatus.STORED: StoreOutcome.STORED,
            wire.CommitStatus.HAVE: StoreOutcome.HAVE,
        }
        for store, status in zip(written, statuses, strict=True):
            self.outcome[store.position] = outcomes.get(status, Reason.REJECTED)


def _requested(identity: EngineBlock | None, server: wire.ServerHello) -> EngineBlock | None:
    """Return what this sidecar requests of a block's identity: an older one cannot read all of it."""
    if identity is None or not identity.router_blocks:
        return identity
    if not server.router_blocks:
        return replace(identity, router_blocks=NO_ROUTER_BLOCKS)
    if not server.prompt_tokens:
        return replace(identity, router_blocks=identity.router_blocks.without_tokens())
    return identity


def _write_one(store: pending.PendingWrite, batch: pending.Batch, expect: pending.Expectation) -> None:
    try:
        block_writer.write_file(store, batch, expect)
        store.close()  # before COMMIT: the sidecar requires that no writer is left
        store.ok = True
    except DeadlineExceededError:
        store.reason = Reason.DEADLINE
    except Exception as e:
        store.reason = Reason.IO
        _log.debug("kvpool: writing a block failed: %s", e)
    finally:
        store.close()
