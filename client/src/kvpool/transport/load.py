"""Load a batch of blocks in windows of at most 64 descriptors, shared by the caller and a few helper threads.

The caller reads cached files and the peer streams, but never waits for a drive: helpers do, and the caller abandons
them at the deadline. Each helper takes blocks until none is left: one job per worker and batch.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import time
from typing import TYPE_CHECKING

from kvpool.errors import CorruptBlockError, DeadlineExceededError, ProtocolError
from kvpool.protocol import wire
from kvpool.stats import Reason
from kvpool.transport import pending, transfer
from kvpool.transport import responses as responses
from kvpool.transport.descriptor_closer import close_later
from kvpool.transport.hot_copy import HotCopy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvpool.transport.connection import Connection
    from kvpool.transport.piece_size import PieceSize
    from kvpool.transport.responses import BlockRequest
    from kvpool.transport.worker_pool import WorkerPool

__all__ = ["LoadBatch"]

_log = logging.getLogger("kvpool")

_PROCESSORS = os.cpu_count() or 1
_HELPER_BYTES = 8 << 20  # work that justifies waking one helper


class LoadBatch:
    """One call of `Client.get_into`. `loads` has an entry per requested block, whatever its outcome.

    While `keeps`, `take_kept` gives verified small blocks of this node with their descriptors; else they are closed.
    """

    def __init__(
        self, deadline: float, workers: WorkerPool, on_corrupt: Callable[[bytes], None], pieces: PieceSize
    ) -> None:
        self.keeps = False
        self.batch = pending.Batch(deadline, pieces)
        self.loads: list[pending.PendingRead] = []
        self._kept: collections.deque[pending.PendingRead] = collections.deque()
        self._workers = workers
        self._on_corrupt = on_corrupt
        self._wants_done = False

    def run_hot(self, hot: Sequence[pending.PendingRead], wanted: Sequence[BlockRequest]) -> Sequence[BlockRequest]:
        """Load what can be copied from memory by kept descriptors, without a request. Return the requests for the rest.

        At the deadline nothing is left: the missing blocks are in `loads`, and no thread writes into the buffers.
        """
        self.loads.extend(hot)
        is_in_time = False
        try:
            is_in_time = HotCopy(self.batch, self._workers, self._kept).run(hot)
        finally:
            if not is_in_time:
                self._abandon(None)
        if not is_in_time:
            return ()
        self.loads = [load for load in hot if load.ok]
        if len(self.loads) == len(wanted):
            return ()
        loaded = {load.position for load in self.loads}
        return [request for request in wanted if request.position not in loaded]

    def take_kept(self) -> list[pending.PendingRead]:
        """Return the blocks whose descriptors the caller takes over, once no more is to be loaded."""
        self.batch.closed = True
        kept = []
        try:
            while self._kept:
                kept.append(self._kept.popleft())
        except IndexError:  # another thread has taken the last one
            pass
        return kept

    def run(self, connection: Connection, expect: pending.Expectation, wanted: Sequence[BlockRequest]) -> bool:
        """Load all blocks. Return False if the deadline expired first. Afterwards no thread writes into the buffers."""
        try:
            for start in range(0, len(wanted), wire.MAX_BATCH):
                streams = self._open(connection, expect, wanted[start : start + wire.MAX_BATCH])
                self._wake_helpers(expect, busy=bool(streams))
                self._read_streams(connection, expect, streams)
                self._drain(expect, may_block=False)
            return self.batch.wait()
        finally:
            self._abandon(connection)
            if self._wants_done and not connection.broken:
                connection.notify(wire.Op.DONE)

    def _open(
        self, connection: Connection, expect: pending.Expectation, window: Sequence[BlockRequest]
    ) -> dict[int, list[pending.PendingRead]]:
        """Request descriptors: files go to `batch.ready`; return the blocks of each peer stream in order."""
        reply = connection.request(
            wire.Op.OPEN,
            wire.pack_deadline(self.batch.deadline) + b"".join(request.block_id for request in window),
            count=len(window),
            flags=wire.Flag.NONE if expect.verify else wire.Flag.VERIFY | wire.Flag.LOCAL_ONLY,
            deadline=self.batch.deadline,
            max_descriptors=len(window),
        )
        try:
            fresh = responses.opened_loads(reply, window, connection, self.batch.deadline)
        except BaseException:
            connection.broken = True
            raise
        self._wants_done = bool(reply.flags & wire.Flag.WANTS_DONE)
        self.loads.extend(fresh)
        for load in fresh:
            if load.reason == Reason.LENGTH:
                self._on_corrupt(load.block_id)  # perhaps a truncated file: the sidecar will verify it
        files = [load for load in fresh if load.descriptor >= 0]
        streams: dict[int, list[pending.PendingRead]] = {}
        for load in fresh:
            if load.stream >= 0:
                streams.setdefault(load.stream, []).append(load)
        self.batch.expect(len(files) + sum(len(blocks) for blocks in streams.values()))
        self.batch.ready.extend(files)
        return streams

    def _wake_helpers(self, expect: pending.Expectation, *, busy: bool) -> None:
        """Wake as many helpers as the pending work justifies; `busy`: the caller has streams to read first."""
        ready = list(self.batch.ready)
        worth = max(busy, sum(len(load.view) for load in ready) // _HELPER_BYTES)
        most = min(self._workers.limit, _PROCESSORS - 1 + busy, len(ready) - 1 + busy)
        for _ in range(min(worth, most)):
            self._workers.submit(lambda: self._drain(expect, may_block=True))

    def _close_local(self, local: list[int]) -> None:
        if self.batch.closed:  # too late for `take_kept`
            local += [load.take_descriptor() for load in self.take_kept()]
        close_later(local, wire.Tier.LOCAL)

    def _drain(self, expect: pending.Expectation, *, may_block: bool) -> None:
        done = 0
        local: list[int] = []  # descriptors of local blocks, closed together
        try:
            while (load := self._next(may_block)) is not None:
                if self._read_one(load, transfer.read_file, expect, may_block):
                    if self.keeps and load.ok and load.payload_sum and load.tier == wire.Tier.LOCAL:
                        self._kept.append(load)
                    elif load.tier == wire.Tier.LOCAL:
                        local.append(load.take_descriptor())
                    else:
                        load.close()
                    done += 1
                else:
                    self.batch.cold.append(load)
                    self._workers.submit(lambda: self._drain(expect, may_block=True))
        finally:
            self._close_local(local)
            self.batch.settle(done)

    def _next(self, may_block: bool) -> pending.PendingRead | None:
        for queue in (self.batch.cold, self.batch.ready) if may_block else (self.batch.ready,):
            try:
                return queue.popleft()
            except IndexError:
                continue
        return None

    def _read_one(
        self,
        load: pending.PendingRead,
        read: Callable[[pending.PendingRead, pending.Batch, pending.Expectation, bool], bool],
        expect: pending.Expectation,
        may_block: bool,
    ) -> bool:
        """Read one block. Return True once its outcome is known, False if a thread that may block must continue."""
        try:
            if not read(load, self.batch, expect, may_block):
                return False
            load.done = time.monotonic()
            load.ok = True
        except CorruptBlockError as e:
            load.reason = Reason.CORRUPT
            _log.warning("kvpool: %s", str(e))  # the exception would keep the engine's buffer alive in the log record
            self._on_corrupt(load.block_id)
        except pending.PeerMissError:
            load.reason = Reason.PEER_ABSENT
        except ProtocolError as e:
            load.reason = Reason.PROTOCOL
            _log.warning("kvpool: %s", e)
            self._on_corrupt(load.block_id)  # probably a peer's file of another length: the sidecar will verify it
        except DeadlineExceededError:
            load.reason = Reason.DEADLINE
        except OSError as e:
            load.reason = Reason.IO if load.stream < 0 else Reason.CONNECTION
            _log.debug("kvpool: reading a block failed: %s", e)
        except Exception:
            load.reason = Reason.INTERNAL
            _log.exception("kvpool: reading a block failed")
        return True

    def _read_streams(
        self, connection: Connection, expect: pending.Expectation, streams: dict[int, list[pending.PendingRead]]
    ) -> None:
        """Read each peer stream by one thread (the caller reads the first). Return when the window is complete."""
        if not streams:
            return
        under_way = pending.Batch(self.batch.deadline)
        under_way.expect(len(streams))

        def read(blocks: list[pending.PendingRead]) -> None:
            try:
                self._read_stream(connection, expect, blocks)
            finally:
                under_way.settle()

        first, *others = streams.values()
        for blocks in others:
            self._workers.submit(lambda blocks=blocks: read(blocks))  # type: ignore[misc]
        read(first)
        if not under_way.wait():
            raise DeadlineExceededError("peer streams missed the deadline")

    def _read_stream(
        self, connection: Connection, expect: pending.Expectation, blocks: list[pending.PendingRead]
    ) -> None:
        stream = transfer.PeerStream(connection.streams[blocks[0].stream], self.batch, expect)

        def read(load: pending.PendingRead, *_: object) -> bool:
            try:
                stream.read(load, is_last=load is blocks[-1])
            except (CorruptBlockError, pending.PeerMissError):
                raise  # a complete response: the next block on this stream can still be read
            except BaseException:
                connection.broken = True
                raise
            return True

        for load in blocks:
            if connection.broken:
                load.reason = Reason.CONNECTION
            else:
                self._read_one(load, read, expect, True)
            self.batch.settle()

    def _abandon(self, connection: Connection | None) -> None:
        self.batch.closed = True
        for queue in (self.batch.ready, self.batch.cold):
            with contextlib.suppress(IndexError):
                while True:
                    queue.popleft().close()
        for load in self.loads:
            with load.gate:  # a current writer has finished; a later one sees `closed`
                pass
            if not load.ok and not load.reason:
                load.reason = Reason.DEADLINE
                if load.stream >= 0 and connection is not None:  # its response is still in flight
                    connection.broken = True
