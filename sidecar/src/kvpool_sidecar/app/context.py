"""Shared state and dependencies of the builders in kvpool_sidecar.app."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import contextlib

    from kvpool_sidecar.blocks.events import BlockEvents
    from kvpool_sidecar.counters import Stats
    from kvpool_sidecar.events.feed import EventFeed
    from kvpool_sidecar.resilience.fair_queue import FairQueues
    from kvpool_sidecar.serving.config_holder import ConfigHolder
    from kvpool_sidecar.serving.fingerprints import Fingerprints
    from kvpool_sidecar.serving.lookup_figures import LookupFigures
    from kvpool_sidecar.settings import ServeSettings

__all__ = ["AppContext", "Component"]


class Component(Protocol):
    """A part that works between `start` and `stop`. Its builder registers `stop` in AppContext.cleanup.

    Parts that /status shows are also a kvpool_sidecar.observability.status.StatusSection.
    """

    def start(self) -> None:
        """Begin to work; does not block."""

    def stop(self) -> None:
        """End the work within a bounded time; also if `start` was not called."""


@dataclass(frozen=True)
class AppContext:
    """Dependencies of every builder. `cleanup` closes what was built, in reverse order."""

    settings: ServeSettings
    config: ConfigHolder
    stats: Stats
    events: BlockEvents
    feed: EventFeed | None
    queues: FairQueues
    fingerprints: Fingerprints
    lookups: LookupFigures
    cleanup: contextlib.ExitStack
