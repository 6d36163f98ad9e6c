"""Status of the sidecar as JSON: the source of /status for the operator and people, and of the gauges in /metrics."""

from __future__ import annotations

import time
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

from kvpool.protocol.block import FORMAT_VERSIONS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvpool_sidecar.counters import Stats
    from kvpool_sidecar.serving.config_holder import ConfigHolder

__all__ = ["Phase", "StatusReport", "StatusSection"]


class Phase(StrEnum):
    """Phase of a sidecar; during a takeover (kvpool_sidecar.app.takeover) one of two sidecars does not serve."""

    STANDING_BY = "StandingBy"
    """Has requested the drives and waits."""
    SERVING = "Serving"
    HANDED_OVER = "HandedOver"
    """Has released the drives, and takes them back if its successor ends."""


class StatusSection(Protocol):
    """A group of fields of /status."""

    def status(self) -> dict[str, Any]:
        """Return the fields: JSON values only, no tenant names."""


class StatusReport:
    """Call it for a fresh report, merged from all sections: JSON values only, no tenant names."""

    def __init__(
        self,
        node: str,
        config: ConfigHolder,
        stats: Stats,
        sections: Sequence[StatusSection],
        ready: Callable[[], bool],
    ) -> None:
        self._node = node
        self._config = config
        self._sections = sections
        self.stats = stats
        self.ready = ready
        self._started = time.monotonic()

    def __call__(self) -> dict[str, Any]:
        report: dict[str, Any] = {
            "node": self._node,
            "phase": Phase.SERVING.value,
            "generation": self._config.current.generation,
            "block_formats": list(FORMAT_VERSIONS),
            "ready": self.ready(),
            "time": int(time.time()),
            "uptime_seconds": int(time.monotonic() - self._started),
        }
        for section in self._sections:
            report.update(section.status())
        return report
