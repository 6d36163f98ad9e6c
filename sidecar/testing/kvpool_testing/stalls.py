"""How late the machine wakes a process that only sleeps: a witness in a process of its own.

A deadline is kept by timers, so a call can be late by the time for which the machine had no processor for it. The
witness sleeps for 20 ms at a time and records by how much it woke late. It shares no interpreter with the client under
test, so what the client does to its own process (copies under the interpreter's lock, threads) is never excused.
"""

from __future__ import annotations

import itertools
import mmap
import os
import struct
import subprocess
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Self

__all__ = ["TICK_S", "Stalls", "overlap_s"]

TICK_S = 0.02
_RECORDED_S = 0.002  # an idle machine wakes a process within a tenth of this
_ROWS = 20_000
_HEAD = struct.Struct("<Qd")  # rows written so far, when the witness is due to wake
_ROW = struct.Struct("<dd")  # due, woken: seconds of time.monotonic(), one clock for all processes
_BYTES = _HEAD.size + _ROWS * _ROW.size
_START_S = 30.0


class Stalls:
    """`with Stalls() as stalls`: when the witness woke late, and by how much. Thread-safe."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("kvpool-stalls", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, _BYTES)
        self._memory = mmap.mmap(self._fd, _BYTES)
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        command = [sys.executable, "-I", __file__, str(self._fd)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[self._fd])  # noqa: S603 - this file
        deadline = time.monotonic() + _START_S
        while _HEAD.unpack_from(self._memory)[1] == 0.0:
            if time.monotonic() > deadline or self._process.poll() is not None:
                self.__exit__()
                raise RuntimeError("the witness of stalls does not start")
            time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()  # the witness ends with its parent
            self._process.wait()
        os.close(self._fd)

    @property
    def pid(self) -> int:
        """Process id of the witness."""
        assert self._process is not None
        return self._process.pid

    def between(self, started: float, ended: float) -> float:
        """Seconds by which the witness woke late in that time, in total. Times of time.monotonic()."""
        return overlap_s(self._rows(), started, ended)

    @property
    def worst_s(self) -> float:
        """The longest delay so far."""
        return max((woken - due for due, woken in self._rows()), default=0.0)

    def _rows(self) -> list[tuple[float, float]]:
        written, due = _HEAD.unpack_from(self._memory)
        rows = list(_ROW.iter_unpack(self._memory[_HEAD.size : _HEAD.size + min(written, _ROWS) * _ROW.size]))
        # the witness may not have woken yet: so far it is late by this much
        return [*rows, (due, max(due, time.monotonic()))] if due else rows


def overlap_s(spans: Iterable[tuple[float, float]], started: float, ended: float) -> float:
    """Seconds of `spans` (start, end) that lie between `started` and `ended`, in total."""
    return sum(max(0.0, min(end, ended) - max(start, started)) for start, end in spans)


def _watch(fd: int) -> None:
    memory = mmap.mmap(fd, _BYTES)
    parent = os.getppid()
    at = itertools.cycle(range(_HEAD.size, _BYTES, _ROW.size))
    written = 0
    while os.getppid() == parent and not _ended():
        due = time.monotonic() + TICK_S
        _HEAD.pack_into(memory, 0, written, due)
        time.sleep(TICK_S)
        woken = time.monotonic()
        if woken - due > _RECORDED_S:
            _ROW.pack_into(memory, next(at), due, woken)
            written += 1


def _ended() -> bool:
    """Whether the parent has closed the pipe."""
    os.set_blocking(0, False)
    try:
        return os.read(0, 1) == b""
    except BlockingIOError:
        return False


if __name__ == "__main__":
    _watch(int(sys.argv[1]))
