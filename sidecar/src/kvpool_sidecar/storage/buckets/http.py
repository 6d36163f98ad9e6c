"""One HTTP/1.1 exchange after the other on kept connections, for objects only: the bytes never become one object.

What is received goes through one buffer per thread into a file, what is sent comes from a file. Heads are bounded, a
body must have a stated length, and each exchange has a time by which it is over. RFC 9112.
"""

from __future__ import annotations

import errno
import os
import socket
import ssl
import threading
import time
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["HttpPool", "HttpResponse"]

_STEP = 1 << 20  # stays in the processor's cache between socket and file
_MAX_HEAD = 32 << 10
_MAX_ERROR = 4 << 10
_buffers = threading.local()


class HttpResponse(NamedTuple):
    """`length` is -1 where it is not stated; `text` is the start of the body unless it went into a file."""

    status: int
    length: int
    text: bytes = b""


class HttpPool:
    """To one host. Thread-safe; at most `keep` wait for their next use. `tls`: None for plain HTTP."""

    def __init__(
        self, host: str, port: int, tls: ssl.SSLContext | None, *, connect_s: float, silence_s: float, keep: int = 16
    ) -> None:
        self._host, self._port, self._tls = host, port, tls
        self._connect_s, self._silence_s, self._keep = connect_s, silence_s, keep
        self._lock = threading.Lock()
        self._idle: list[socket.socket] = []

    def request(
        self,
        method: str,
        target: str,
        headers: Mapping[str, str],
        until: float,
        *,
        send: tuple[int, int] | None = None,
        receive: tuple[int, int] | None = None,
    ) -> HttpResponse:
        """One request. `send`: descriptor and length of its body. `receive`: descriptor and exact length for a 200's.

        `until` is of time.monotonic. OSError for everything that is not a whole answer in time.
        """
        head = f"{method} {target} HTTP/1.1\r\n" + "".join(f"{k}: {v}\r\n" for k, v in headers.items()) + "\r\n"
        while True:
            sock, kept = self._take()
            try:
                answer, reusable = _exchange(sock, head.encode("latin-1"), method, until, send, receive)
            except _StaleError:
                sock.close()
                if not kept:
                    raise
                continue  # the server closed an idle connection: nothing was done
            except BaseException:
                sock.close()
                raise
            self._give(sock, reusable)
            return answer

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for sock in idle:
            sock.close()

    def _take(self) -> tuple[socket.socket, bool]:
        with self._lock:
            if self._idle:
                return self._idle.pop(), True
        sock = socket.create_connection((self._host, self._port), timeout=self._connect_s)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                sock = self._tls.wrap_socket(sock, server_hostname=self._host)
            sock.settimeout(self._silence_s)
        except BaseException:
            sock.close()
            raise
        return sock, False

    def _give(self, sock: socket.socket, reusable: bool) -> None:
        with self._lock:
            if reusable and len(self._idle) < self._keep:
                self._idle.append(sock)
                return
        sock.close()


class _StaleError(ConnectionError):
    """The connection ended before the first byte of a response."""


def _exchange(
    sock: socket.socket,
    head: bytes,
    method: str,
    until: float,
    send: tuple[int, int] | None,
    receive: tuple[int, int] | None,
) -> tuple[HttpResponse, bool]:
    sent = True
    try:
        sock.sendall(head)
        if send is not None:
            _send_file(sock, *send, until)
    except (BrokenPipeError, ConnectionResetError):
        sent = False  # the response may give the reason
    lines, rest = _read_head(sock, until)
    status, fields = _parse(lines)
    length = int(fields["content-length"]) if fields.get("content-length", "").isdecimal() else -1
    reusable = sent and "close" not in fields.get("connection", "").lower() and "transfer-encoding" not in fields
    if method == "HEAD" or status in (204, 304):
        return HttpResponse(status, length), reusable and not rest
    if receive is not None and status in (200, 206):
        if length != receive[1]:
            raise OSError(errno.EIO, f"the object has {length} bytes now, not {receive[1]}")
        _receive_file(sock, rest, *receive, until)
        return HttpResponse(status, length), reusable
    text = bytearray(rest)
    while len(text) < min(length if length >= 0 else _MAX_ERROR, _MAX_ERROR):
        piece = _receive(sock, 4096, until)
        if not piece:
            break
        text += piece
    return HttpResponse(status, length, bytes(text[:_MAX_ERROR])), reusable and length == len(text)


def _send_file(sock: socket.socket, fd: int, size: int, until: float) -> None:
    at = 0
    while at < size:
        _in_time(until)
        if isinstance(sock, ssl.SSLSocket):
            piece = os.pread(fd, min(_STEP, size - at), at)
            sock.sendall(piece)
            done = len(piece)
        else:
            done = _sendfile(sock, fd, at, min(8 * _STEP, size - at))
        if not done:
            raise OSError(errno.EIO, "the staged file is cut short")
        at += done


def _sendfile(sock: socket.socket, fd: int, at: int, count: int) -> int:
    """Send a part of a file. os.sendfile alone may raise BlockingIOError on a socket with a timeout."""
    with open(os.dup(fd), "rb") as file:
        return sock.sendfile(file, at, count)


def _read_head(sock: socket.socket, until: float) -> tuple[list[str], bytes]:
    """Return the header lines of the first final response, and the bytes received after them."""
    data = bytearray()
    while True:
        end = data.find(b"\r\n\r\n")
        if end >= 0:
            lines = data[:end].decode("latin-1").split("\r\n")
            rest = bytes(data[end + 4 :])
            if " 100 " not in lines[0] + " ":
                return lines, rest
            data = bytearray(rest)
            continue
        if len(data) > _MAX_HEAD:
            raise OSError(errno.EPROTO, "the head of an answer is too large")
        try:
            piece = _receive(sock, 8192, until)
        except ConnectionResetError:
            piece = b""
        if not piece:
            if data:
                raise OSError(errno.EPROTO, "the answer ended early")
            raise _StaleError(errno.ECONNRESET, "the connection ended without an answer")
        data += piece


def _parse(lines: list[str]) -> tuple[int, dict[str, str]]:
    parts = lines[0].split(" ", 2)
    if len(parts) < 2 or not parts[0].startswith("HTTP/1.") or not parts[1].isdecimal():
        raise OSError(errno.EPROTO, "the answer is not HTTP")
    fields: dict[str, str] = {}
    for line in lines[1:]:
        name, separator, value = line.partition(":")
        if not separator or (name.lower() == "content-length" and "content-length" in fields):
            raise OSError(errno.EPROTO, "the head of an answer is no head")
        fields[name.strip().lower()] = value.strip()
    return int(parts[1]), fields


def _receive_file(sock: socket.socket, first: bytes, fd: int, size: int, until: float) -> None:
    buffer: memoryview | None = getattr(_buffers, "buffer", None)
    if buffer is None:
        buffer = _buffers.buffer = memoryview(bytearray(_STEP))
    if len(first) > size:
        raise OSError(errno.EPROTO, "more came than the answer stated")
    _write(fd, memoryview(first), 0)
    at = len(first)
    while at < size:
        _in_time(until)
        got = sock.recv_into(buffer, min(_STEP, size - at))
        if not got:
            raise OSError(errno.EIO, f"the object ended {size - at} bytes early")
        _write(fd, buffer[:got], at)
        at += got


def _receive(sock: socket.socket, count: int, until: float) -> bytes:
    _in_time(until)
    return sock.recv(count)


def _in_time(until: float) -> None:
    if time.monotonic() > until:
        raise TimeoutError(errno.ETIMEDOUT, "the object store is too slow")


def _write(fd: int, data: memoryview, at: int) -> None:
    while data:
        done = os.pwrite(fd, data, at)
        data, at = data[done:], at + done
