"""Moves bytes from a peer's TCP connection to a client's unix stream without a copy in this process.

TCP -> pipe -> unix stream: splice(2) hands on references to pages, and the client's receive makes the only copy. Where
the kernel cannot do that, or has no pipe left, the bytes are copied through a buffer.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import fcntl
import os
import threading
import time
from typing import TYPE_CHECKING

from kvpool.errors import DeadlineExceededError, ProtocolError

if TYPE_CHECKING:
    import socket

__all__ = ["COPY_BYTES", "Pipe", "PipePool", "forward"]

COPY_BYTES = 256 << 10
_PIPE_BYTES = 1 << 20
_MIN_PIPE_BYTES = 64 << 10  # a user with too many pages in pipes gets pipes of two pages: copying is faster then
_MAX_PIPES = 32
_MOVE, _MORE = 1, 4  # SPLICE_F_MOVE, SPLICE_F_MORE
_UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)


class Pipe:
    """An empty pipe of `size` bytes."""

    def __init__(self) -> None:
        self.read_fd, self.write_fd = os.pipe2(os.O_CLOEXEC)
        with contextlib.suppress(OSError):
            fcntl.fcntl(self.write_fd, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self.size: int = fcntl.fcntl(self.write_fd, fcntl.F_GETPIPE_SZ)

    def close(self) -> None:
        os.close(self.read_fd)
        os.close(self.write_fd)


class PipePool:
    """Pipes for the answers in transfer, at most 32. Thread-safe; no method waits."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: collections.deque[Pipe] = collections.deque()
        self._count = 0
        self._is_supported = True

    def take(self) -> Pipe | None:
        """Return an empty pipe; None if the caller must copy."""
        with self._lock:
            if not self._is_supported:
                return None
            if self._idle:
                return self._idle.pop()
            if self._count >= _MAX_PIPES:
                return None
            self._count += 1
        pipe = None
        try:
            pipe = Pipe()
            if pipe.size >= _MIN_PIPE_BYTES:
                return pipe
        except OSError:
            pass
        self.discard(pipe)
        return None

    def give_back(self, pipe: Pipe) -> None:
        """Take an empty pipe back; closed if the pool is closed or disabled."""
        with self._lock:
            if self._is_supported:
                self._idle.append(pipe)
                return
        self.discard(pipe)

    def discard(self, pipe: Pipe | None) -> None:
        """Close a pipe that may hold bytes."""
        with self._lock:
            self._count -= 1
        if pipe is not None:
            pipe.close()

    def disable(self) -> None:
        """Copy from now on: this kernel cannot splice between these sockets."""
        with self._lock:
            self._is_supported = False

    def close(self) -> None:
        """Close the idle pipes, and the others as they are given back."""
        with self._lock:
            self._is_supported = False
            self._count -= len(self._idle)
            idle, self._idle = self._idle, collections.deque()
        for pipe in idle:
            pipe.close()


def forward(source: socket.socket, target: socket.socket, size: int, pipes: PipePool, deadline: float) -> None:
    """Move exactly `size` bytes from `source` to `target`, blocking sockets with kernel timeouts.

    Raises DeadlineExceededError at `deadline` (monotonic), ProtocolError if `source` ends, or OSError, also at a kernel
    timeout. Both sockets are unusable then.
    """
    pipe = pipes.take()
    if pipe is None:
        _copy(source, target, size, deadline)
        return
    left, count, is_empty = size, 0, True
    try:
        while left:
            count = os.splice(source.fileno(), pipe.write_fd, min(left, pipe.size), flags=_MOVE | _MORE)
            if count == 0:
                raise ProtocolError("the peer closed the connection")
            left -= count
            is_empty = False
            _drain(pipe, target, count, deadline, more=left > 0)
            is_empty = True
            _require_time(deadline)
    except OSError as e:
        if e.errno not in _UNSUPPORTED or left + (0 if is_empty else count) != size:
            raise
        pipes.disable()
        if not is_empty:
            target.sendall(os.read(pipe.read_fd, count))
        is_empty = True
        _copy(source, target, left, deadline)
    finally:
        if is_empty:
            pipes.give_back(pipe)
        else:
            pipes.discard(pipe)


def _drain(pipe: Pipe, target: socket.socket, count: int, deadline: float, *, more: bool) -> None:
    flags = _MOVE | (_MORE if more else 0)
    while count:
        count -= os.splice(pipe.read_fd, target.fileno(), count, flags=flags)
        if count:
            _require_time(deadline)


def _copy(source: socket.socket, target: socket.socket, size: int, deadline: float) -> None:
    buffer = memoryview(bytearray(min(size, COPY_BYTES)))
    while size:
        count = source.recv_into(buffer[: min(size, len(buffer))])
        if count == 0:
            raise ProtocolError("the peer closed the connection")
        target.sendall(buffer[:count])
        size -= count
        _require_time(deadline)


def _require_time(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise DeadlineExceededError("the client reads too slowly, or the peer sends too slowly")
