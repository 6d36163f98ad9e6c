"""Applies configuration changes to a running sidecar, as far as they need no restart.

The kubelet replaces the file of a ConfigMap some time after the ConfigMap has changed, so the file is polled twice a
second. The operator pushes the same text earlier by an operation (kvpool_sidecar.admin.reload). A text that is invalid,
or that changes a field that is not live (kvpool.config), has no effect; for the latter the operator restarts the
process.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any

from kvpool.config import PoolConfig, digest, loads, static_part
from kvpool.errors import ConfigError
from kvpool_sidecar.resilience.worker import PeriodicTask

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpool_sidecar.settings import ConfigFile

__all__ = ["ConfigReloader", "differences"]

log = logging.getLogger(__name__)

_POLL_INTERVAL_S = 0.5
_MAX_REPORTED = 5
_FILE_DELAY_S = 300.0  # the kubelet takes a minute or two to update the file


class ConfigReloader:
    """Calls `on_change` with each new valid configuration, from one thread at a time. Thread-safe."""

    def __init__(self, file: ConfigFile | None, running: PoolConfig, on_change: Callable[[PoolConfig], None]) -> None:
        self._file = file
        self._on_change = on_change
        self._lock = threading.Lock()
        self._running = running
        self._digest = digest(file.text) if file is not None else ""
        self._seen = file.text if file is not None else ""
        self._problem = ""
        self._needs_restart = False
        self._ahead_until = 0.0
        self._task = PeriodicTask("configuration", self._watch, _POLL_INTERVAL_S, run_at_once=False)

    def start(self) -> None:
        if self._file is not None:
            self._task.start()

    def stop(self) -> None:
        self._task.stop(0.0)

    def status(self) -> dict[str, Any]:
        """Return the configuration in force, and why a later one is not, for /status."""
        return {
            "digest": self._digest,
            "generation": self._running.generation,
            "problem": self._problem,
            "needs_restart": self._needs_restart,
        }

    def apply(self, text: str) -> str:
        """Apply a text that was pushed; return the reason if it was not applied.

        Until the file has the same text, or five minutes have passed, the file is older and ignored.
        """
        with self._lock:
            problem = self._try_apply(text)
            if not problem:
                self._ahead_until = time.monotonic() + _FILE_DELAY_S
            return problem

    def _try_apply(self, text: str) -> str:
        try:
            self._problem, self._needs_restart = "", False
            self._apply(text)
        except ConfigError as e:
            self._problem = str(e)
            log.warning("the changed configuration is not applied; the previous one stays in force: %s", e)
        return self._problem

    def _apply(self, text: str) -> None:
        if self._file is None:
            raise ConfigError("this sidecar has no configuration file")
        wanted = self._file.adapt(loads(PoolConfig, text, where=self._file.path))
        if wanted.generation < self._running.generation and wanted.uid == self._running.uid:
            return  # older than the one in force
        if changed := differences(static_part(self._running), static_part(wanted)):
            self._needs_restart = True
            more = f" and {len(changed) - _MAX_REPORTED} more" if len(changed) > _MAX_REPORTED else ""
            raise ConfigError(f"needs a restart: {', '.join(changed[:_MAX_REPORTED])}{more}")
        if wanted != self._running:
            self._on_change(wanted)
        self._running, self._digest = wanted, digest(text)
        log.info("configuration %s of generation %d is in force", self._digest, wanted.generation)

    def _watch(self) -> None:
        try:
            self._poll()
        except Exception as e:
            log.exception("cannot apply the changed configuration because of a defect")
            self._problem = type(e).__name__

    def _poll(self) -> None:
        assert self._file is not None  # noqa: S101
        try:
            text = self._file.read()
        except ConfigError as e:
            self._problem = str(e)
            return
        if text == self._seen:
            return
        with self._lock:
            if time.monotonic() < self._ahead_until and self._is_older(text):
                return  # the kubelet has not updated the file yet
            self._seen, self._ahead_until = text, 0.0
            self._try_apply(text)

    def _is_older(self, text: str) -> bool:
        """Return whether the text differs from the one in force and has no higher generation.

        Tenants change without a new generation.
        """
        try:
            generation = loads(PoolConfig, text).generation
            return generation <= self._running.generation and digest(text) != self._digest
        except (ConfigError, ValueError):
            return False


def differences(one: Any, other: Any, path: str = "") -> list[str]:
    """Return the names of the fields that differ, such as `peer.port` or `local[0].path`."""
    if isinstance(one, dict) and isinstance(other, dict):
        return [
            difference
            for name in sorted(one.keys() | other.keys())
            for difference in differences(one.get(name), other.get(name), f"{path}.{name}".lstrip("."))
        ]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return [difference for n, (a, b) in pairs for difference in differences(a, b, f"{path}[{n}]")]
    return [] if one == other else [path]
