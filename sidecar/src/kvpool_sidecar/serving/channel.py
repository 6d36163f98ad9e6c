"""Packets and file descriptors on one client's socket."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import socket
import struct
import termios
import time
from typing import TYPE_CHECKING

from kvpool.protocol import wire
from kvpool_sidecar.peers.tcp import set_send_timeout

if TYPE_CHECKING:
    from kvpool_sidecar.counters import Stats

__all__ = ["PacketChannel"]

_SEND_TIMEOUT_S = 5.0
_DRAIN_TIMEOUT_S = 0.2
_MAX_ERROR_BYTES = 512


class PacketChannel:
    """Sends replies, with file descriptors where the reply needs them. Not thread-safe, except `shutdown_reads`."""

    def __init__(self, sock: socket.socket, stats: Stats) -> None:
        self._socket = sock
        self._stats = stats

    def open(self, timeout_s: float) -> None:
        """Limit the time of each send, and of receiving the first packet."""
        set_send_timeout(self._socket, _SEND_TIMEOUT_S)
        self._socket.settimeout(timeout_s)

    def receive_into(self, buffer: bytearray) -> int:
        """Receive one packet; 0 at the end. The kernel drops descriptors that a client sends."""
        return self._socket.recv_into(buffer)

    def clear_timeout(self) -> None:
        """Wait for further packets without a limit."""
        self._socket.settimeout(None)

    def shutdown_reads(self) -> None:
        """End the connection after the current request. Thread-safe."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RD)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def reply(self, head: wire.Head, body: bytes, *, count: int = 0) -> None:
        """Send the reply to a request."""
        self._socket.sendall(wire.pack(head.op | wire.REPLY, body, count=count, request=head.request))

    def reply_error(self, request: int, code: wire.ErrorCode, text: str) -> None:
        """Send an error as the reply to a request."""
        body = struct.pack("<H", code) + text.encode()[:_MAX_ERROR_BYTES]
        self._socket.sendall(wire.pack(wire.Op.ERROR | wire.REPLY, body, request=request))

    def reply_with_fds(self, head: wire.Head, body: bytes, count: int, fds: list[int], flags: int = 0) -> bool:
        """Send a reply with descriptors; return False, with nothing sent, if the kernel has too many in flight."""
        packet = wire.pack(head.op | wire.REPLY, body, count=count, request=head.request, flags=flags)
        if not fds:
            self._socket.sendall(packet)
            return True
        try:
            socket.send_fds(self._socket, [packet], fds)
        except OSError as e:
            if e.errno != errno.ETOOMANYREFS:
                raise
            self._stats.add("refused", "descriptors-in-flight")
            return False
        return True

    def peer_buffer_empty(self) -> bool:
        """Wait up to 0.2 s until the client has read everything sent to it.

        Descriptors that were not received count against the limit of this whole process.
        """
        deadline = time.monotonic() + _DRAIN_TIMEOUT_S
        while True:
            (unread,) = struct.unpack("i", fcntl.ioctl(self._socket, termios.TIOCOUTQ, bytes(4)))
            if unread == 0:
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(0.001)
