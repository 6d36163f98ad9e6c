"""BEGIN and COMMIT requests of one client connection: tokens, write transactions and the write grant."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from kvpool.protocol import wire
from kvpool.protocol.block import HEADER_BYTES
from kvpool_sidecar.resilience.turn import end_turn
from kvpool_sidecar.serving.messages import decode_begin, decode_tokens, encode_begin_refusals

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpool_sidecar.resilience.fair_queue import FairQueue, Grant
    from kvpool_sidecar.serving.channel import PacketChannel
    from kvpool_sidecar.serving.pod import Pod
    from kvpool_sidecar.serving.store_service import StoreService
    from kvpool_sidecar.storage.base import WriteTransaction

__all__ = ["MAX_TOKENS", "WriteHandler"]

MAX_TOKENS = 2 * wire.MAX_BATCH
_MAX_QUEUE_S = 1.0


class _Write(NamedTuple):
    block_id: bytes
    pending: WriteTransaction


class WriteHandler:
    """Handles BEGIN and COMMIT, and holds the connection's unfinished writes and write grant. Not thread-safe."""

    def __init__(self, channel: PacketChannel, pod: Pod, stores: StoreService, queue: FairQueue) -> None:
        self._channel = channel
        self._pod = pod
        self._stores = stores
        self._queue = queue
        self._grant: Grant | None = None
        self._writes: dict[int, _Write] = {}
        self._next_token = 1

    def begin(self, head: wire.Head, body: memoryview) -> None:
        """Answer a BEGIN request with a token and a writable file for each accepted block."""
        blocks = decode_begin(head, body)
        answers, begun = self._begin(blocks)
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
        tokens = decode_tokens(head, body)
        end_turn()  # the tenant's lookups must not wait for its blocks' way to the drive
        statuses = [wire.CommitStatus.REJECTED] * len(tokens)
        written = [(n, write) for n, token in enumerate(tokens) if (write := self._writes.pop(token, None)) is not None]
        if unknown := len(tokens) - len(written):
            self._stores.stats.add("rejected", "token", unknown)
        try:
            found = self._stores.commit_all(self._pod.tenant, [write for _, write in written], fill=fill)
        finally:
            self._pod.release(sum(write.pending.file_bytes for _, write in written))
        stored = 0
        for (n, write), status in zip(written, found, strict=True):
            statuses[n] = status
            if status == wire.CommitStatus.STORED:
                stored += write.pending.payload_len
        if not self._writes:
            self._end_grant()
        return bytes(statuses), stored

    def close(self) -> None:
        """Abort all unfinished writes and release the grant."""
        for token in list(self._writes):
            self._abort(token)
        self._end_grant()

    def _begin(self, blocks: Sequence[tuple[bytes, int]]) -> tuple[list[bytes], list[int]]:
        """Return the answer for each block, and the tokens of those to write."""
        deadline = time.monotonic() + _MAX_QUEUE_S
        refusal = self._acquire(sum(payload_len for _, payload_len in blocks), deadline)
        room = 0 if refusal else MAX_TOKENS - len(self._writes)
        accepted = [
            n for n, (_, payload_len) in enumerate(blocks[:room]) if self._pod.reserve(_file_bytes(payload_len))
        ]
        if refused := len(blocks) - len(accepted):
            self._stores.stats.add("refused", refusal or "too-many-writes", refused)
        answers = [encode_begin_refusals(1)] * len(blocks)
        tokens: list[int] = []
        begun = self._stores.begin(self._pod, [blocks[n] for n in accepted], deadline)
        for n, (status, key, pending) in zip(accepted, begun, strict=True):
            token = 0
            if pending is None:
                self._pod.release(_file_bytes(blocks[n][1]))
            else:
                token, self._next_token = self._next_token, self._next_token % 0xFFFFFFFF + 1
                self._writes[token] = _Write(blocks[n][0], pending)
                tokens.append(token)
            answers[n] = wire.BEGIN_REPLY.pack(status, token, key)
        return answers, tokens

    def _acquire(self, size: int, deadline: float) -> str:
        """Acquire a grant for `size` bytes; return the reason of a refusal, or an empty string."""
        if not self._channel.peer_buffer_empty():
            return "unread-descriptors"
        self._end_grant()
        self._grant = self._queue.acquire(self._pod.tenant.tag, size, deadline)
        return "" if self._grant is not None else "busy-writes"

    def _end_grant(self) -> None:
        if self._grant is not None:
            self._queue.release(self._grant)
            self._grant = None

    def _abort(self, token: int) -> None:
        write = self._writes.pop(token)
        write.pending.abort()
        self._pod.release(write.pending.file_bytes)


def _file_bytes(payload_len: int) -> int:
    return HEADER_BYTES + payload_len
