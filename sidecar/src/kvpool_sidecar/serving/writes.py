"""BEGIN and COMMIT requests of one client connection: tokens, write transactions and the write grant."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from kvpool.protocol import wire
from kvpool.protocol.block import HEADER_BYTES
from kvpool_sidecar.serving.messages import decode_begin, decode_tokens, encode_begin_refusals

if TYPE_CHECKING:
    from kvpool_sidecar.resilience.fair_queue import FairQueue, Grant
    from kvpool_sidecar.serving.block_service import BlockService
    from kvpool_sidecar.serving.channel import PacketChannel
    from kvpool_sidecar.serving.pod import Pod
    from kvpool_sidecar.storage.base import WriteTransaction

__all__ = ["MAX_TOKENS", "WriteHandler"]

MAX_TOKENS = 2 * wire.MAX_BATCH
_MAX_QUEUE_S = 1.0


class _Write(NamedTuple):
    block_id: bytes
    pending: WriteTransaction


class WriteHandler:
    """Handles BEGIN and COMMIT, and holds the connection's unfinished writes and write grant. Not thread-safe."""

    def __init__(self, channel: PacketChannel, pod: Pod, service: BlockService, queue: FairQueue) -> None:
        self._channel = channel
        self._pod = pod
        self._service = service
        self._queue = queue
        self._grant: Grant | None = None
        self._writes: dict[int, _Write] = {}
        self._next_token = 1

    def begin(self, head: wire.Head, body: memoryview) -> None:
        """Answer a BEGIN request with a token and a writable file for each accepted block."""
        blocks = decode_begin(head, body)
        answers: list[bytes] = []
        begun: list[int] = []
        refusal = self._acquire(sum(length for _, length in blocks))
        for block_id, payload_len in blocks:
            status, token, key = self._begin_one(block_id, payload_len, refusal)
            if token:
                begun.append(token)
            answers.append(wire.BEGIN_REPLY.pack(status, token, key))
        sent = False
        try:
            fds = [self._writes[token].pending.writer for token in begun]
            sent = self._channel.reply_with_fds(head, b"".join(answers), head.items, fds)
        finally:
            for token in begun:
                if sent:
                    self._writes[token].pending.close_writer()
                else:
                    self._abort(token)
        if not sent:
            self._channel.reply(head, encode_begin_refusals(head.items), count=head.items)
        if not self._writes:
            self._end_grant()

    def reject(self, head: wire.Head) -> None:
        """Answer a BEGIN request with refusals, because the node is overloaded."""
        self._channel.reply(head, encode_begin_refusals(head.items), count=head.items)

    def commit(self, head: wire.Head, body: memoryview) -> tuple[bytes, int]:
        """Publish the written blocks of a COMMIT request; return the body of its reply and the payload bytes stored."""
        fill = bool(head.flags & wire.Flag.VERIFY)
        statuses = bytearray()
        stored = 0
        for token in decode_tokens(head, body):
            write = self._writes.pop(token, None)
            if write is None:
                self._service.stats.add("rejected", "token")
                statuses.append(wire.CommitStatus.REJECTED)
                continue
            try:
                status = self._service.commit(self._pod.tenant, write.block_id, write.pending, fill=fill)
            finally:
                self._pod.release(write.pending.file_bytes)
            if status == wire.CommitStatus.STORED:
                stored += write.pending.payload_len
            statuses.append(status)
        if not self._writes:
            self._end_grant()
        return bytes(statuses), stored

    def close(self) -> None:
        """Abort all unfinished writes and release the grant."""
        for token in list(self._writes):
            self._abort(token)
        self._end_grant()

    def _begin_one(self, block_id: bytes, payload_len: int, refusal: str) -> tuple[wire.BeginStatus, int, bytes]:
        """Return status, token (0 without a write) and key of one block."""
        file_bytes = HEADER_BYTES + payload_len
        if refusal or len(self._writes) >= MAX_TOKENS or not self._pod.reserve(file_bytes):
            self._service.stats.add("refused", refusal or "too-many-writes")
            return wire.BeginStatus.REFUSED, 0, bytes(32)
        status, key, pending = self._service.begin(self._pod.tenant, block_id, payload_len)
        if pending is None:
            self._pod.release(file_bytes)
            return status, 0, key
        token, self._next_token = self._next_token, self._next_token % 0xFFFFFFFF + 1
        self._writes[token] = _Write(block_id, pending)
        return status, token, key

    def _acquire(self, size: int) -> str:
        """Acquire a grant for `size` bytes; return the reason of a refusal, or an empty string."""
        if not self._channel.peer_buffer_empty():
            return "unread-descriptors"
        self._end_grant()
        self._grant = self._queue.acquire(self._pod.tenant.tag, size, time.monotonic() + _MAX_QUEUE_S)
        return "" if self._grant is not None else "busy-writes"

    def _end_grant(self) -> None:
        if self._grant is not None:
            self._queue.release(self._grant)
            self._grant = None

    def _abort(self, token: int) -> None:
        write = self._writes.pop(token)
        self._service.abort(write.pending)
        self._pod.release(write.pending.file_bytes)
