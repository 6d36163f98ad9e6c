"""Processes that a run starts: each with a log and a group of its own, gone when the run is gone."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from bench.sessions import guard

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["Child", "StartError", "drop_shared_memory", "free_ports", "kill_group", "steady"]

_TERM_S = 5.0
_SHM = Path("/dev/shm")


class StartError(Exception):
    """Something did not come up; the message says what, and the end of its log."""


class Child:
    """One process and what it starts, in a group. Start it from the main thread: see bench.sessions.guard."""

    def __init__(self, name: str, command: Sequence[str], log: Path, env: Mapping[str, str]) -> None:
        self.name = name
        self._log = log
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                [sys.executable, guard.__file__, str(os.getpid()), *command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=dict(env),
                process_group=0,  # Ctrl-C is for the benchmark alone, which then ends everything in order
            )
        self.pid = self._process.pid

    def wait_ready(self, ready: Callable[[], bool], limit_s: float) -> None:
        """StartError if it ends, or if `limit_s` passes, before it is ready."""
        until = time.monotonic() + limit_s
        while not ready():
            if self._process.poll() is not None or time.monotonic() > until:
                how = "ended" if self._process.poll() is not None else f"is not ready after {limit_s:.0f} s"
                raise StartError(f"{self.name} {how}: {self.last_lines()}")
            time.sleep(0.1)

    def ask_to_end(self) -> None:
        """Begin to end it; `end` waits."""
        if self._process.poll() is None:
            self._process.terminate()

    def end(self) -> None:
        """SIGTERM, some patience, then SIGKILL for the whole group."""
        self.ask_to_end()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_TERM_S)
        kill_group(self.pid)
        self._process.wait()

    def last_lines(self) -> str:
        """The end of its log."""
        return self._log.read_text(errors="replace")[-1500:]


def kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def free_ports(count: int) -> list[int]:
    """Ports of the loopback interface that nobody uses now."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()


def steady(count: Callable[[], object], quiet_s: float = 0.5, limit_s: float = 20.0) -> bool:
    """Wait until `count` has given the same for `quiet_s`: whatever is stored in the background is stored."""
    until = time.monotonic() + limit_s
    before, since = count(), time.monotonic()
    while time.monotonic() - since < quiet_s:
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
        now = count()
        if now != before:
            before, since = now, time.monotonic()
    return True


def drop_shared_memory(prefix: str) -> None:
    """Names in /dev/shm that begin with `prefix`: an engine that was killed leaves its own behind."""
    for file in _SHM.glob(f"{prefix}*"):
        file.unlink(missing_ok=True)
