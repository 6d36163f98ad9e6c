"""A changed configuration, taken by a running sidecar as far as that can be done without a restart.

The kubelet exchanges the file of a ConfigMap some time after the ConfigMap changed, so the file is looked at twice a
second; the operator brings the same text sooner by an operation (kvpool_sidecar.admin.reload). What cannot be read
stays without effect, and so does what differs in a field that is not live (kvpool.config): for that the operator
restarts the process, which then reads the whole.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any

from kvpool.config import PoolConfig, digest, loads, static_part
from kvpool.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpool_sidecar.settings import ConfigFile

__all__ = ["ConfigReloader", "differences"]

log = logging.getLogger(__name__)

_LOOK_S = 0.5
_SHOWN = 5
_FILE_FOLLOWS_S = 300.0  # the kubelet takes a minute or two


class ConfigReloader:
    """`apply` is given each configuration that can be taken, from one thread at a time. Thread-safe."""

    def __init__(self, file: ConfigFile | None, running: PoolConfig, apply: Callable[[PoolConfig], None]) -> None:
        self._file = file
        self._apply = apply
        self._lock = threading.Lock()
        self._running = running
        self._digest = digest(file.text) if file is not None else ""
        self._seen = file.text if file is not None else ""
        self._problem = ""
        self._needs_restart = False
        self._ahead_until = 0.0
        self._stop = threading.Event()

    def start(self) -> None:
        if self._file is not None:
            threading.Thread(target=self._watch, name="configuration", daemon=True).start()

    def stop(self) -> None:
        self._stop.set()

    def status(self) -> dict[str, Any]:
        """For /status: which configuration is in force, and why not the latest."""
        return {
            "digest": self._digest,
            "generation": self._running.generation,
            "problem": self._problem,
            "needs_restart": self._needs_restart,
        }

    def take(self, text: str) -> str:
        """Have this text in force, if it can be; else the reason why it is not.

        For a text that comes by another way than the file: until the file says the same, what it says is older.
        """
        with self._lock:
            problem = self._try(text)
            if not problem:
                self._ahead_until = time.monotonic() + _FILE_FOLLOWS_S
            return problem

    def _try(self, text: str) -> str:
        try:
            self._problem, self._needs_restart = "", False
            self._take(text)
        except ConfigError as e:
            self._problem = str(e)
            log.warning("the changed configuration is not used: %s", e)
        return self._problem

    def _take(self, text: str) -> None:
        if self._file is None:
            raise ConfigError("this sidecar was not given a file")
        wanted = self._file.adapt(loads(PoolConfig, text, where=self._file.path))
        if wanted.generation < self._running.generation and wanted.uid == self._running.uid:
            return  # it comes late
        if found := differences(static_part(self._running), static_part(wanted)):
            self._needs_restart = True
            more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
            raise ConfigError(f"needs a restart: {', '.join(found[:_SHOWN])}{more}")
        if wanted != self._running:
            self._apply(wanted)
        self._running, self._digest = wanted, digest(text)
        log.info("configuration %s of generation %d is in force", self._digest, wanted.generation)

    def _watch(self) -> None:
        while not self._stop.wait(_LOOK_S):
            try:
                self._look()
            except Exception as e:
                log.exception("the changed configuration")
                self._problem = type(e).__name__

    def _look(self) -> None:
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
                return  # the kubelet has not brought yet what is in force
            self._seen, self._ahead_until = text, 0.0
            self._try(text)

    def _is_older(self, text: str) -> bool:
        """Of the generation in force, or of one before, and not the same: tenants change without a generation."""
        try:
            generation = loads(PoolConfig, text).generation
            return generation <= self._running.generation and digest(text) != self._digest
        except (ConfigError, ValueError):
            return False


def differences(one: Any, other: Any, path: str = "") -> list[str]:
    """Names of the fields in which two configurations differ: `peer.port`, `local[0].path`."""
    if isinstance(one, dict) and isinstance(other, dict):
        return [
            found
            for name in sorted(one.keys() | other.keys())
            for found in differences(one.get(name), other.get(name), f"{path}.{name}".lstrip("."))
        ]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return [found for n, (a, b) in pairs for found in differences(a, b, f"{path}[{n}]")]
    return [] if one == other else [path]
