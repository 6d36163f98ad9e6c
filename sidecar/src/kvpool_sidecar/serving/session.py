"""One client connection: packets in, packets and descriptors out. Whatever is not exactly right ends it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import socket
import struct
import termios
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, NamedTuple

from kvpool.errors import KVPoolError, ProtocolError
from kvpool.protocol import wire
from kvpool.protocol.block import HEADER_BYTES
from kvpool.stats import BUCKETS_S, STORE
from kvpool_sidecar.peers.tcp import set_send_timeout
from kvpool_sidecar.serving.block_service import OpenResult, PeerStreams, close_files

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpool_sidecar.index.base import NodeInfo
    from kvpool_sidecar.peers.connection import PeerConnection
    from kvpool_sidecar.resilience.fair_queue import FairQueues, Grant
    from kvpool_sidecar.serving.block_service import BlockService
    from kvpool_sidecar.serving.fingerprints import Fingerprints
    from kvpool_sidecar.serving.pod import Pod
    from kvpool_sidecar.storage.base import WriteTransaction
    from kvpool_sidecar.tenancy.identity import Tenant

__all__ = ["Session"]

log = logging.getLogger(__name__)

MAX_TOKENS = 2 * wire.MAX_BATCH
_HELLO_S = 3.0
_SEND_S = 5.0
_DRAIN_S = 0.2
_MIN_DEADLINE_S, _MAX_DEADLINE_S = 0.001, 60.0
_MAX_COUNT = 1 << 53
_FIRST_GUESS = 2 << 20  # bytes of a block, before this client has asked for one
_TELL_BYTES = 8 << 20  # of a load whose end is worth a message in any case
_READ_PATIENCE = 0.4  # of the deadline may go by in the queue; the rest is for reading
_WRITE_PATIENCE_S = 1.0
_TIMED = {*(tier.name.lower() for tier in wire.Tier if tier), STORE}
_TOKEN = struct.Struct("<I")
_DEADLINE = struct.Struct("<I")


class _VersionError(ProtocolError):
    """The client is of another version."""


class _Write(NamedTuple):
    block_id: bytes
    pending: WriteTransaction


class Session:
    """Runs in a thread of its own. Tokens and peer streams die with it."""

    def __init__(
        self,
        sock: socket.socket,
        pod: Pod,
        node: BlockService,
        node_name: str,
        dial: Callable[[NodeInfo, float], PeerConnection],
        fingerprints: Fingerprints,
        admission: FairQueues,
    ) -> None:
        self._socket = sock
        self._pod = pod
        self._reads_of: tuple[Tenant, ...] = (pod.tenant,)  # its own first
        self._node = node
        self._node_name = node_name
        self._fingerprints = fingerprints
        self._admission = admission
        self._reading: Grant | None = None
        self._writing: Grant | None = None
        self._typical_bytes = _FIRST_GUESS
        self._hello: wire.ClientHello | None = None
        self._stopped = False
        self._writes: dict[int, _Write] = {}
        self._next_token = 1
        give_back = node.fetcher.release if node.fetcher is not None else lambda _slot: None
        self._streams = PeerStreams(dial, give_back, node.peers.mark_down)

    def run(self) -> None:
        """Serve until the client is gone, breaks the protocol, or `stop`."""
        buffer = bytearray(wire.MAX_PACKET + 1)
        try:
            set_send_timeout(self._socket, _SEND_S)
            self._socket.settimeout(_HELLO_S)
            while True:
                size = self._socket.recv_into(buffer)  # descriptors that a client sends are dropped by the kernel
                if size == 0 or self._stopped:
                    return
                self._handle(memoryview(buffer)[:size])
                self._socket.settimeout(None)
        except ProtocolError as e:
            self._node.stats.add("refused", "protocol")
            log.warning("pod %s broke the protocol: %s", self._pod.identity.uid, e)
        except TimeoutError:
            log.info("pod %s connected and said nothing", self._pod.identity.uid)
        except OSError as e:
            log.debug("pod %s: %s", self._pod.identity.uid, e)
        finally:
            self._end()

    def stop(self) -> None:
        """From another thread: end after the request that is being answered; what came after it is not read."""
        self._stopped = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RD)

    def _forget_hello(self) -> None:
        if self._hello is not None:
            self._fingerprints.left(self._hello, self._pod.identity.uid)
            self._hello = None

    def _end(self) -> None:
        self._forget_hello()
        for write in self._writes.values():
            self._node.local.abort(write.pending)
            self._pod.give_room(write.pending.file_bytes)
        self._writes.clear()
        self._streams.close()
        self._end_read()
        self._end_write()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _handle(self, packet: memoryview) -> None:
        started = time.monotonic()
        request = 0
        try:
            head, body = wire.unpack(packet)
            request = head.request
            self._end_read()
            self._operation(head.op)(head, body)
        except ProtocolError as e:
            code = wire.ErrorCode.VERSION if isinstance(e, _VersionError) else wire.ErrorCode.BAD_REQUEST
            with contextlib.suppress(OSError):
                self._send_error(request, code, str(e))
            raise
        except KVPoolError as e:
            self._send_error(request, wire.ErrorCode.INTERNAL, str(e))
            return
        name = wire.Op(head.op).name.lower()
        self._node.stats.add("requests", name)
        self._node.stats.observe("request_seconds", name, time.monotonic() - started)

    def _operation(self, op: int) -> Callable[[wire.Head, memoryview], None]:
        if op == wire.Op.HELLO:
            return self._say_hello
        if self._hello is None:
            raise ProtocolError("HELLO comes first")
        operations: dict[int, Callable[[wire.Head, memoryview], None]] = {
            wire.Op.LOOKUP: self._lookup,
            wire.Op.OPEN: self._open,
            wire.Op.BEGIN: self._begin,
            wire.Op.COMMIT: self._commit,
            wire.Op.REPORT: self._report,
            wire.Op.DONE: self._done,
        }
        if op not in operations:
            raise ProtocolError(f"unknown operation {op}")
        return operations[op]

    def _reply(self, head: wire.Head, body: bytes, *, count: int = 0) -> None:
        self._socket.sendall(wire.pack(head.op | wire.REPLY, body, count=count, request=head.request))

    def _send_error(self, request: int, code: wire.ErrorCode, text: str) -> None:
        body = struct.pack("<H", code) + text.encode()[:512]
        self._socket.sendall(wire.pack(wire.Op.ERROR | wire.REPLY, body, request=request))

    # -- operations

    def _say_hello(self, head: wire.Head, body: memoryview) -> None:
        hello = wire.ClientHello.unpack(body)
        if hello.version != wire.PROTOCOL_VERSION:
            raise _VersionError(f"version {hello.version} is not {wire.PROTOCOL_VERSION}, which this sidecar speaks")
        self._forget_hello()
        self._hello = hello
        self._fingerprints.entered(hello, self._pod.identity.uid)
        granted = self._pod.readable if hello.reads_granted else ()  # a client of before would take them for corrupt
        self._reads_of = (self._pod.tenant, *granted)
        config = self._node.config
        answer = wire.ServerHello(
            tenant_tag=self._pod.tenant.tag,
            max_block_bytes=config.cache.max_block_bytes,
            pool=f"{config.namespace}/{config.pool}",
            node=self._node_name,
            deadlines=asdict(config.deadlines),
            events=config.events.enabled,
            readable_tags=tuple(tenant.tag for tenant in granted),
            salt_key=self._pod.tenant.salt_key if config.salt_tags else b"",
        )
        self._reply(head, answer.pack())

    def _lookup(self, head: wire.Head, body: memoryview) -> None:
        timeout, rest = _deadline(body)
        block_ids = wire.split_block_ids(rest, head.items, wire.MAX_LOOKUP)
        every = bool(head.flags & wire.Flag.EXHAUSTIVE)
        located = self._node.locate(self._reads_of, block_ids, timeout, every=every)
        tiers = located.tiers
        self._node.stats.add("lookup", "asked", len(block_ids))
        self._node.stats.add("lookup", "found", len(tiers) - tiers.count(wire.Tier.MISS))
        self._reply(head, tiers, count=len(tiers))
        self._node.looked_up(self._pod.tenant, block_ids, located)

    def _open(self, head: wire.Head, body: memoryview) -> None:
        timeout, rest = _deadline(body)
        block_ids = wire.split_block_ids(rest, head.items, wire.MAX_BATCH)
        began = time.monotonic()
        if not self._drained():
            self._node.stats.add("refused", "unread-descriptors")
            opened = [OpenResult(wire.OpenStatus.MISS) for _ in block_ids]
        elif not self._may_read(len(block_ids), began + timeout * _READ_PATIENCE):
            self._node.stats.add("refused", "busy-reads", len(block_ids))
            busy = wire.OPEN_REPLY.pack(wire.OpenStatus.MISS, wire.Tier.MISS, 0, wire.MISS_BUSY, 0, bytes(32))
            self._reply(head, busy * len(block_ids), count=len(block_ids))
            return
        else:
            left = max(began + timeout - time.monotonic(), _MIN_DEADLINE_S)
            opened = self._node.open(self._reads_of, block_ids, head.flags, left, self._streams)
        flags = self._opened(opened)
        try:
            fds = [entry.fd for entry in opened if entry.status == wire.OpenStatus.FILE]
            fds += [entry.fd for entry in opened if entry.status == wire.OpenStatus.STREAM_NEW_CONN]
            if not self._send_with(head, _open_body(opened), len(opened), fds, flags):
                self._end_read()
                for entry in opened:
                    if entry.tier == wire.Tier.PEER and entry.stream:
                        self._streams.drop(entry.stream)  # asked for, and nobody will read the answer
                self._reply(head, _open_body([OpenResult(wire.OpenStatus.MISS) for _ in opened]), count=len(opened))
        finally:
            close_files(opened)

    def _may_read(self, count: int, deadline: float) -> bool:
        """Take a grant for as many blocks, by the size of this client's last ones."""
        self._reading = self._admission.reads.acquire(self._pod.tenant.tag, count * self._typical_bytes, deadline)
        return self._reading is not None

    def _opened(self, opened: list[OpenResult]) -> wire.Flag:
        """Now the sizes are known: correct the grant; TELL if its end is to be told."""
        if self._reading is None:
            return wire.Flag.NONE
        sizes = [entry.payload_len for entry in opened if entry.status != wire.OpenStatus.MISS]
        if not sizes:
            self._end_read()
            return wire.Flag.NONE
        self._typical_bytes = max(sizes)
        tell = sum(sizes) >= _TELL_BYTES or self._admission.reads.is_busy
        self._admission.reads.resize(self._reading, sum(sizes), told=tell)
        return wire.Flag.WANTS_DONE if tell else wire.Flag.NONE

    def _end_read(self) -> None:
        if self._reading is not None:
            self._admission.reads.release(self._reading)
            self._reading = None

    def _why_not_write(self, body: memoryview) -> str:
        """Empty if there is a grant for these blocks now."""
        if not self._drained():
            return "unread-descriptors"
        self._end_write()
        wanted = sum(length for _, length in wire.BEGIN_REQUEST.iter_unpack(body))
        until = time.monotonic() + _WRITE_PATIENCE_S
        self._writing = self._admission.writes.acquire(self._pod.tenant.tag, wanted, until)
        return "" if self._writing is not None else "busy-writes"

    def _end_write(self) -> None:
        if self._writing is not None:
            self._admission.writes.release(self._writing)
            self._writing = None

    def _done(self, _head: wire.Head, _body: memoryview) -> None:
        """The grant has ended already: any message ends it."""

    def _begin(self, head: wire.Head, body: memoryview) -> None:
        size = wire.BEGIN_REQUEST.size
        if not 0 < head.items <= wire.MAX_BATCH or len(body) != head.items * size:
            raise ProtocolError(f"{head.items} blocks in {len(body)} bytes")
        answers: list[bytes] = []
        begun: list[tuple[int, _Write]] = []
        refusal = self._why_not_write(body)
        for at in range(0, len(body), size):
            block_id, payload_len = wire.BEGIN_REQUEST.unpack_from(body, at)
            status, key, pending = wire.BeginStatus.REFUSED, bytes(32), None
            size_there = HEADER_BYTES + payload_len
            if refusal or len(self._writes) >= MAX_TOKENS or not self._pod.take_room(size_there):
                self._node.stats.add("refused", refusal or "too-many-writes")
            else:
                status, key, pending = self._node.begin(self._pod.tenant, block_id, payload_len)
                if pending is None:
                    self._pod.give_room(size_there)
            token = 0
            if pending is not None:
                token, self._next_token = self._next_token, self._next_token % 0xFFFFFFFF + 1
                write = self._writes[token] = _Write(block_id, pending)
                begun.append((token, write))
            answers.append(wire.BEGIN_REPLY.pack(status, token, key))
        sent = False
        try:
            sent = self._send_with(head, b"".join(answers), head.items, [w.pending.writer for _, w in begun])
        finally:
            for token, write in begun:
                if sent:
                    write.pending.close_writer()
                else:
                    self._drop(token)
        if not sent:
            refused = wire.BEGIN_REPLY.pack(wire.BeginStatus.REFUSED, 0, bytes(32))
            self._reply(head, refused * head.items, count=head.items)
        if not self._writes:
            self._end_write()

    def _commit(self, head: wire.Head, body: memoryview) -> None:
        if not 0 < head.items <= wire.MAX_BATCH or len(body) != head.items * _TOKEN.size:
            raise ProtocolError(f"{head.items} tokens in {len(body)} bytes")
        fill = bool(head.flags & wire.Flag.VERIFY)
        statuses = bytearray()
        for (token,) in _TOKEN.iter_unpack(body):
            write = self._writes.pop(token, None)
            if write is None:
                self._node.stats.add("rejected", "token")
                statuses.append(wire.CommitStatus.REJECTED)
                continue
            try:
                status = self._node.commit(self._pod.tenant, write.block_id, write.pending, fill=fill)
            finally:
                self._pod.give_room(write.pending.file_bytes)
            if status == wire.CommitStatus.STORED and self._hello is not None:
                self._fingerprints.stored(self._hello, write.pending.payload_len)
            statuses.append(status)
        if not self._writes:
            self._end_write()
        self._reply(head, bytes(statuses), count=head.items)

    def _report(self, head: wire.Head, body: memoryview) -> None:
        value = wire.unpack_json(body)
        corrupt = value.get("corrupt", [])
        if not isinstance(corrupt, list) or len(corrupt) > wire.MAX_BATCH:
            raise ProtocolError("too many corrupt blocks in one report")
        block_ids = [_block_id(text) for text in corrupt]
        for family in ("hits", "bytes", "misses", "tokens"):
            counts = value.get(family, {})
            if not isinstance(counts, dict):
                raise ProtocolError(f"{family} is not an object")
            for label, n in counts.items():
                if not isinstance(n, int) or isinstance(n, bool) or not 0 <= n <= _MAX_COUNT:
                    raise ProtocolError(f"{family} is not a count")
                self._node.stats.add(f"client_{family}", label, n)
        self._report_seconds(value.get("seconds", {}))
        self._node.report(self._reads_of, block_ids)
        self._reply(head, b"")

    def _report_seconds(self, times: object) -> None:
        if not isinstance(times, dict) or not times.keys() <= _TIMED:
            raise ProtocolError("seconds are not those of tiers")
        for label, packed in times.items():
            if not isinstance(packed, list) or len(packed) != len(BUCKETS_S) + 2:
                raise ProtocolError("seconds are not a histogram")
            if not all(type(n) is int and 0 <= n <= _MAX_COUNT for n in packed):
                raise ProtocolError("seconds are not counts")
            self._node.stats.observe_packed("client_seconds", label, packed)

    # -- descriptors

    def _drained(self) -> bool:
        """Has the client read all that we sent? Descriptors that are not received count against this whole process."""
        until = time.monotonic() + _DRAIN_S
        while True:
            (unread,) = struct.unpack("i", fcntl.ioctl(self._socket, termios.TIOCOUTQ, bytes(4)))
            if unread == 0:
                return True
            if time.monotonic() > until:
                return False
            time.sleep(0.001)

    def _send_with(self, head: wire.Head, body: bytes, count: int, fds: list[int], flags: int = 0) -> bool:
        """Send with descriptors; False if the kernel has too many in flight already, and nothing was sent."""
        packet = wire.pack(head.op | wire.REPLY, body, count=count, request=head.request, flags=flags)
        if not fds:
            self._socket.sendall(packet)
            return True
        try:
            socket.send_fds(self._socket, [packet], fds)
        except OSError as e:
            if e.errno != errno.ETOOMANYREFS:
                raise
            self._node.stats.add("refused", "descriptors-in-flight")
            return False
        return True

    def _drop(self, token: int) -> None:
        write = self._writes.pop(token)
        self._node.local.abort(write.pending)
        self._pod.give_room(write.pending.file_bytes)


def _deadline(body: memoryview) -> tuple[float, memoryview]:
    if len(body) < _DEADLINE.size:
        raise ProtocolError("no deadline")
    (ms,) = _DEADLINE.unpack_from(body)
    return min(max(ms / 1000, _MIN_DEADLINE_S), _MAX_DEADLINE_S), body[_DEADLINE.size :]


def _block_id(text: object) -> bytes:
    try:
        block_id = bytes.fromhex(text) if isinstance(text, str) and len(text) == 2 * wire.BLOCK_ID_BYTES else b""
    except ValueError:
        block_id = b""
    if len(block_id) != wire.BLOCK_ID_BYTES:
        raise ProtocolError("not a block id in hex")
    return block_id


def _open_body(opened: list[OpenResult]) -> bytes:
    return b"".join(
        wire.OPEN_REPLY.pack(entry.status, entry.tier, entry.stream, 0, entry.payload_len, entry.key)
        for entry in opened
    )
