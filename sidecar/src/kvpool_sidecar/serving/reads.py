"""OPEN requests of one client connection: the read grant, the block files and the streams."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvpool.protocol import wire
from kvpool_sidecar.serving.messages import MIN_DEADLINE_S, encode_busy, encode_open, split_deadline
from kvpool_sidecar.serving.opener import OpenResult

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpool_sidecar.resilience.fair_queue import FairQueue, Grant
    from kvpool_sidecar.serving.block_service import BlockService
    from kvpool_sidecar.serving.channel import PacketChannel
    from kvpool_sidecar.serving.peer_streams import PeerStreams
    from kvpool_sidecar.serving.pod import Pod
    from kvpool_sidecar.tenancy.identity import Tenant

__all__ = ["ReadHandler"]

_FIRST_GUESS = 2 << 20  # bytes of a block, before this client has opened one
_DONE_BYTES = 8 << 20  # a load of this size is worth a DONE message at its end
_MAX_QUEUE_SHARE = 0.4  # of the deadline may pass in the queue; the rest is for reading


class ReadHandler:
    """Handles OPEN requests and holds the connection's read grant. Not thread-safe."""

    def __init__(
        self, channel: PacketChannel, pod: Pod, service: BlockService, streams: PeerStreams, queue: FairQueue
    ) -> None:
        self._channel = channel
        self._pod = pod
        self._service = service
        self._queue = queue
        self._grant: Grant | None = None
        self._expected_block_bytes = _FIRST_GUESS
        self._streams = streams

    def open(self, head: wire.Head, body: memoryview, tenants: Sequence[Tenant], began: float) -> None:
        """Answer an OPEN request, which arrived at `began` (time.monotonic()), with block files and streams."""
        timeout, rest = split_deadline(body)
        block_ids = wire.split_block_ids(rest, head.items, wire.MAX_BATCH)
        if not self._channel.peer_buffer_empty():
            self._service.stats.add("refused", "unread-descriptors")
            results = [OpenResult(wire.OpenStatus.MISS) for _ in block_ids]
        elif self._service.opener.local.holds_too_much(self._pod.tenant.tag):
            self._service.stats.add("refused", "held-files", len(block_ids))
            results = [OpenResult(wire.OpenStatus.MISS) for _ in block_ids]
        elif not self._acquire(len(block_ids), began + timeout * _MAX_QUEUE_SHARE):
            self._service.stats.add("refused", "busy-reads", len(block_ids))
            self._channel.reply(head, encode_busy(len(block_ids)), count=len(block_ids))
            return
        else:
            left = max(began + timeout - time.monotonic(), MIN_DEADLINE_S)
            results = self._service.opener.open(tenants, block_ids, head.flags, left, self._streams)
            results = self._service.causes.of_open(tenants, block_ids, results, (time.monotonic() - began) / timeout)
        flags = wire.Flag.WANTS_DONE if self._wants_done(results) else wire.Flag.NONE
        try:
            self._send(head, results, flags)
        finally:
            self._service.opener.close_files(results)

    def reject(self, head: wire.Head) -> None:
        """Answer an OPEN request with misses, because the node is overloaded."""
        self._channel.reply(head, encode_busy(head.items), count=head.items)

    def end_grant(self) -> None:
        """Release the read grant."""
        if self._grant is not None:
            self._queue.release(self._grant)
            self._grant = None

    def close(self) -> None:
        """Close all streams and release the grant."""
        self._streams.close()
        self.end_grant()

    def _send(self, head: wire.Head, results: list[OpenResult], flags: wire.Flag) -> None:
        fds = [entry.fd for entry in results if entry.status == wire.OpenStatus.FILE]
        if self._channel.reply_with_fds(head, encode_open(results), len(results), fds, flags):
            return
        self.end_grant()
        for entry in results:
            if entry.tier == wire.Tier.PEER and entry.stream:
                self._streams.drop(entry.stream)  # the blocks were requested, and no client reads them
        misses = encode_open([OpenResult(wire.OpenStatus.MISS) for _ in results])
        self._channel.reply(head, misses, count=len(results))

    def _acquire(self, count: int, deadline: float) -> bool:
        """Acquire a grant for `count` blocks of the size that this client opened last."""
        self._grant = self._queue.acquire(self._pod.tenant.tag, count * self._expected_block_bytes, deadline)
        return self._grant is not None

    def _wants_done(self, results: list[OpenResult]) -> bool:
        """Resize the grant to the actual sizes; return whether the client is to send DONE at the end of the load."""
        if self._grant is None:
            return False
        sizes = [entry.payload_len for entry in results if entry.status != wire.OpenStatus.MISS]
        if not sizes:
            self.end_grant()
            return False
        self._expected_block_bytes = max(sizes)
        wants_done = sum(sizes) >= _DONE_BYTES or self._queue.is_busy
        self._queue.resize(self._grant, sum(sizes), notified=wants_done)
        return wants_done
