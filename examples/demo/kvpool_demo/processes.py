"""Child processes of the demo: each in a group of its own with a log, none outlives the demo."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from kvpool_demo import tether

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

__all__ = ["Child", "StartError", "wait_for"]

TERM_SECONDS = 3.0


class StartError(Exception):
    """Something did not come up; the message says what and where its log is."""


class Child:
    """One process and whatever it starts.

    Ctrl-C reaches the demo alone (the child's group is not the terminal's), which then stops its children; if the demo
    is killed, the kernel kills them. Start them from the main thread (see kvpool_demo.tether).
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str | Path],
        log: Path,
        environment: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.name = name
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        tethered = [sys.executable, tether.__file__, str(os.getpid()), *(str(c) for c in command)]
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                tethered,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=dict(os.environ if environment is None else environment),
                pass_fds=tuple(pass_fds),
                process_group=0,
            )
        self.pid = self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def status(self) -> int | None:
        """Its exit status, None while it runs."""
        return self._process.poll()

    def terminate(self) -> None:
        """Ask it to end; `stop` waits for it."""
        if self.alive:
            self._process.terminate()

    def stop(self, patience_s: float = TERM_SECONDS) -> None:
        """SIGTERM, some patience, then SIGKILL for the whole group."""
        if self.alive:
            self.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(patience_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()

    def tail(self, lines: int = 12) -> str:
        """The end of its log, for error messages."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


def wait_for(what: str, child: Child, ready: Callable[[], bool], timeout_s: float) -> None:
    """StartError if `child` ends or `timeout_s` passes before it is `ready`."""
    until = time.monotonic() + timeout_s
    while not ready():
        if not child.alive:
            raise StartError(f"{what} ended while starting; its log {child.log} ends with:\n{child.tail()}")
        if time.monotonic() > until:
            raise StartError(f"{what} is not there after {timeout_s:.0f} s; {child.log} ends with:\n{child.tail()}")
        time.sleep(0.02)
