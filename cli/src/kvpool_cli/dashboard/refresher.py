"""Reads the cluster in the background while a page is open."""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time
from typing import TYPE_CHECKING, Any

from kvpool_cli.errors import CliError, UnreachableError
from kvpool_cli.kubectl import TIMEOUT_S, Kubectl

if TYPE_CHECKING:
    from collections.abc import Callable

_LEAD_S = 30.0
"""Reads continue for this time after the last request of a page."""


class Refresher:
    """The newest document, and why there is no newer one. Safe to use from several threads.

    `read` returns a document or raises CliError; it runs in one thread, at most every `interval_s` seconds.
    """

    def __init__(self, read: Callable[[], dict[str, Any]], interval_s: float) -> None:
        self._read = read
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._document: dict[str, Any] | None = None
        self._read_at = 0.0
        self._problem = ""
        self._wanted_until = time.monotonic() + _LEAD_S
        self._wake = threading.Event()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="refresher", daemon=True)

    def start(self) -> None:
        """Start to read."""
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Stop to read, and wait for a read under way. What makes `read` return early is the caller's to do before."""
        self._stopped.set()
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def state(self) -> tuple[dict[str, Any] | None, float, str]:
        """Return the newest document, its age in seconds, and the problem of the last read; and ask for more reads."""
        now = time.monotonic()
        with self._lock:
            is_idle = self._wanted_until < now
            self._wanted_until = now + _LEAD_S
            found = self._document, now - self._read_at if self._document is not None else 0.0, self._problem
        if is_idle:
            self._wake.set()
        return found

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                document, problem = self._read(), ""
            except CliError as e:
                document, problem = None, str(e)
            except Exception as e:
                document, problem = None, f"{type(e).__name__}: {e}"
            with self._lock:
                self._problem = problem
                if document is not None:
                    self._document, self._read_at = document, time.monotonic()
            self._stopped.wait(self._interval_s)
            with self._lock:
                is_idle = self._wanted_until < time.monotonic()
                self._wake.clear()
            if is_idle and not self._stopped.is_set():
                self._wake.wait()


class StoppableKubectl(Kubectl):
    """A kubectl whose processes end with `stop`."""

    def __init__(self, options: tuple[str, ...] = (), program: str = "kubectl") -> None:
        super().__init__(options, program)
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._is_stopped = False

    def stop(self) -> None:
        """End all processes; later requests raise UnreachableError."""
        with self._lock:
            self._is_stopped = True
            running = list(self._running)
        for process in running:
            with contextlib.suppress(OSError):
                process.kill()

    def _execute(self, command: list[str], stdin: bytes | None) -> subprocess.CompletedProcess[bytes]:
        with self._lock:
            if self._is_stopped:
                raise UnreachableError("the dashboard ends")
            pipe = subprocess.PIPE
            process = subprocess.Popen(command, stdin=pipe if stdin else None, stdout=pipe, stderr=pipe)  # noqa: S603
            self._running.add(process)
        try:
            out, err = process.communicate(stdin, timeout=2 * TIMEOUT_S)
        except BaseException:
            process.kill()
            process.wait()
            raise
        finally:
            with self._lock:
                self._running.discard(process)
        return subprocess.CompletedProcess(command, process.returncode, out, err)
