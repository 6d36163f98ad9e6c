"""One connection to the sidecar of this node: a SOCK_SEQPACKET unix socket, and the peer streams that belong to it.

A connection is used by one thread at a time (see kvpool.transport.connection_pool). After anything but a complete,
well-formed reply it is `broken`: the pool closes it on release, with every descriptor that it received.
"""

from __future__ import annotations

import array
import contextlib
import os
import select
import socket
import struct
import time
from typing import NamedTuple

from kvpool.errors import DeadlineExceededError, PoolUnavailableError, ProtocolError, RefusedError
from kvpool.protocol import peer_wire, wire
from kvpool.transport.descriptor_closer import close_later

__all__ = ["Connection", "Reply"]

_REPLY_BYTES = wire.HEADER.size + wire.MAX_JSON  # the largest reply is HELLO's JSON
_ANCILLARY_BYTES = socket.CMSG_LEN(wire.MAX_BATCH * 2 * array.array("i").itemsize)
_CLOSE_ON_EXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)  # children of the engine must not hold blocks
_MAX_ABANDONED = 8
_LONGEST_PATH = 100


class Reply(NamedTuple):
    """One reply; the receiver owns (and closes) the descriptors."""

    items: int
    body: bytes
    descriptors: list[int]
    flags: int = 0


class Connection:
    """Connects and sends HELLO. Raises PoolUnavailableError, DeadlineExceededError, ProtocolError or RefusedError."""

    def __init__(self, path: str, hello: wire.ClientHello, timeout_s: float) -> None:
        self.broken = False
        self.streams: dict[int, socket.socket] = {}
        self._path = path
        self._request = 0
        self._abandoned: set[int] = set()
        self._buffer = bytearray(_REPLY_BYTES)
        deadline = time.monotonic() + timeout_s
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._readable, self._writable = _poller(self._socket, select.POLLIN), _poller(self._socket, select.POLLOUT)
        try:
            self._socket.settimeout(timeout_s)
            try:
                _connect(self._socket, path)
            except OSError as e:
                raise PoolUnavailableError((e.strerror or str(e)).lower(), where=path) from None
            self._socket.settimeout(0)
            reply = self.request(wire.Op.HELLO, hello.pack(), deadline=deadline)
            self.server = _checked_hello(reply.body, path)
        except BaseException:
            self.close()
            raise

    def fileno(self) -> int:
        """The socket's descriptor, -1 once closed."""
        return self._socket.fileno()

    def request(
        self,
        op: wire.Op,
        body: bytes = b"",
        *,
        deadline: float,
        count: int = 0,
        flags: int = 0,
        max_descriptors: int = 0,
        abandonable: bool = False,
    ) -> Reply:
        """Send a request and wait for its reply until `deadline` (time.monotonic()).

        `abandonable`: the sidecar keeps nothing for the reply, so after a missed deadline the connection stays usable
        and the late reply is discarded, with its descriptors. Raises PoolUnavailableError, DeadlineExceededError,
        ProtocolError and RefusedError (the sidecar replied ERROR).
        """
        self._request = (self._request + 1) & 0xFFFFFFFF
        request = self._request
        try:
            self._send(wire.pack(op, body, count=count, request=request, flags=flags), deadline)
            while True:
                _wait(self._readable, deadline)
                try:
                    head, answer, descriptors = self._receive()
                except BlockingIOError:
                    continue
                if head.request == request:
                    break
                self._discard_late(head, descriptors)
        except TimeoutError:
            if abandonable and len(self._abandoned) < _MAX_ABANDONED:
                self._abandoned.add(request)
            else:
                self.broken = True
            raise DeadlineExceededError(f"no reply to {op.name} before the deadline", where=self._path) from None
        except ProtocolError:
            self.broken = True
            raise
        except OSError as e:
            self.broken = True
            raise PoolUnavailableError(f"connection lost: {e.strerror or e}", where=self._path) from None
        return self._checked(op, head, answer, descriptors, max_descriptors)

    def notify(self, op: wire.Op, body: bytes = b"", *, count: int = 0) -> bool:
        """Send a message that has no reply; dropped, and False, if the socket is not writable immediately."""
        try:
            self._socket.send(wire.pack(op, body, count=count), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except OSError:
            return False
        return True

    def dial_stream(self, number: int, token: bytes, deadline: float) -> None:
        """Dial the stream socket of the sidecar and open stream `number`. OSError if that fails by `deadline`."""
        self._drop_ended_streams()
        stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            stream.setblocking(True)  # a connect that does not block fails while the sidecar's backlog is full
            remaining = max(0.001, deadline - time.monotonic())
            timeout = struct.pack("@ll", int(remaining), int(remaining % 1 * 1e6))
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
            _connect(stream, self._path + peer_wire.STREAM_SUFFIX)
            stream.sendall(token)
        except BaseException:
            stream.close()
            raise
        self.streams[number] = stream

    def _drop_ended_streams(self) -> None:
        """Close streams that the sidecar has ended and that hold no unread bytes."""
        poller = select.poll()
        numbers = {}
        for number, stream in self.streams.items():
            numbers[stream.fileno()] = number
            poller.register(stream, select.POLLIN | select.POLLRDHUP)
        for descriptor, events in poller.poll(0):
            if events & (select.POLLHUP | select.POLLRDHUP) and not _has_bytes(self.streams[numbers[descriptor]]):
                self.streams.pop(numbers[descriptor]).close()

    def close(self) -> None:
        """End the connection; its descriptors are closed in the background. Safe to call twice."""
        self.shut()
        # the last descriptor of a file may be in an unread reply, and close with the socket
        close_later([*(stream.detach() for stream in self.streams.values()), self._socket.detach()])
        self.streams.clear()

    def close_copies(self) -> None:
        """Close a forked child's copies of the descriptors; the parent's connection continues."""
        self.broken = True
        for stream in self.streams.values():
            stream.close()
        self.streams.clear()
        self._socket.close()

    def shut(self) -> None:
        """Shut the socket down immediately; `close` frees the descriptors later."""
        self.broken = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _send(self, packet: bytes, deadline: float) -> None:
        if time.monotonic() >= deadline:
            raise TimeoutError
        while True:
            try:
                self._socket.send(packet)
            except BlockingIOError:
                _wait(self._writable, deadline)
            else:
                return

    def _receive(self) -> tuple[wire.Head, bytes, list[int]]:
        size, ancillary, flags, _ = self._socket.recvmsg_into([self._buffer], _ANCILLARY_BYTES, _CLOSE_ON_EXEC)
        descriptors: list[int] = []
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                received = array.array("i")
                received.frombytes(data[: len(data) - len(data) % received.itemsize])
                descriptors.extend(received)
        try:
            head, body = _unpacked(memoryview(self._buffer)[:size], flags)
        except BaseException:
            close_later(descriptors)
            raise
        return head, bytes(body), descriptors

    def _discard_late(self, head: wire.Head, descriptors: list[int]) -> None:
        known = head.request in self._abandoned
        self._abandoned.discard(head.request)
        close_later(descriptors)
        if not known:
            raise ProtocolError("a reply to no request", where=self._path)

    def _checked(
        self, op: wire.Op, head: wire.Head, body: bytes, descriptors: list[int], max_descriptors: int
    ) -> Reply:
        if head.op == op | wire.REPLY and len(descriptors) <= max_descriptors:
            return Reply(head.items, body, descriptors, head.flags)
        close_later(descriptors)
        if head.op == wire.Op.ERROR | wire.REPLY or head.op == wire.Op.ERROR:
            code = int.from_bytes(body[:2], "little")
            text = body[2:200].decode("utf-8", "replace")
            self.broken = code in (wire.ErrorCode.BAD_REQUEST, wire.ErrorCode.VERSION)
            raise RefusedError(f"the sidecar refused {op.name}: {code} {text}", where=self._path)
        self.broken = True
        raise ProtocolError(f"unexpected reply {head.op} to {op.name}", where=self._path)


def _poller(sock: socket.socket, events: int) -> select.poll:
    poller = select.poll()
    poller.register(sock, events)
    return poller


def _wait(poller: select.poll, deadline: float) -> None:
    """Wait for an event. TimeoutError at `deadline` (time.monotonic()).

    A socket's own timeout would give up the GIL three times for each call instead of once.
    """
    remaining = deadline - time.monotonic()
    if remaining <= 0 or not poller.poll(remaining * 1000):
        raise TimeoutError


def _has_bytes(stream: socket.socket) -> bool:
    try:
        return bool(stream.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    except OSError:
        return False


def _connect(sock: socket.socket, path: str) -> None:
    """Connect, also to a path that is longer than the 107 bytes of a unix socket's address."""
    if len(os.fsencode(path)) <= _LONGEST_PATH:
        sock.connect(path)
        return
    directory = os.open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sock.connect(f"/proc/self/fd/{directory}/{os.path.basename(path)}")
    finally:
        os.close(directory)


def _checked_hello(body: bytes, path: str) -> wire.ServerHello:
    server = wire.ServerHello.unpack(body)
    if server.version != wire.PROTOCOL_VERSION:
        raise ProtocolError(
            f"protocol version refused: sidecar {server.version}, client {wire.PROTOCOL_VERSION}", where=path
        )
    return server


def _unpacked(packet: memoryview, flags: int) -> tuple[wire.Head, memoryview]:
    if not packet:
        raise ConnectionResetError("closed by the sidecar")
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        raise ProtocolError("truncated packet")
    return wire.unpack(packet)
