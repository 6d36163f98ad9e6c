"""Takeover of the drives during a rollout: the new sidecar of a node starts alongside the old one.

    new:  stands by, requests the drives  ->  serves
    old:  serves  ->  hands the drives over on request, and waits: if the new one ends, it takes them back

Engines miss only for the duration of the handover instead of a whole pod replacement, and if the new release cannot
serve, the old one continues.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from kvpool_sidecar.app.standby_http import StandbyServer
from kvpool_sidecar.observability.status import Phase
from kvpool_sidecar.storage.local.ownership import DriveOwnership

if TYPE_CHECKING:
    import threading

    from kvpool_sidecar.settings import ServeSettings

__all__ = ["POLL_INTERVAL_S", "TakeoverWatch", "await_ownership"]

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.1
_FAST_POLL_INTERVAL_S = 0.02  # while engines wait for the handover
_REQUEST_TIMEOUT_S = 10.0  # then report ready: the old release hangs or cannot hand over, so its pod must be stopped
_ABANDONED_S = 1.0  # drives without owner and request for this long are taken back


def await_ownership(settings: ServeSettings, done: threading.Event, *, back: bool) -> DriveOwnership | None:
    """Wait until no process serves from the drives; return None if `done` is set first.

    Close the returned object once the drives are open. `back`: this process handed the drives over before, and waits
    until the other sidecar has ended.
    """
    phase = Phase.HANDED_OVER if back else Phase.STANDING_BY
    ownership = DriveOwnership([tier.path for tier in settings.config.local])
    if not back:
        ownership.request()
        if ownership.available:
            return ownership
    log.info("another sidecar owns this node's drives: %s", phase.value)
    began = time.monotonic()
    standby = StandbyServer(
        settings.address,
        settings.config.http_port,
        settings.node,
        phase,
        ready=lambda: back or time.monotonic() - began > _REQUEST_TIMEOUT_S,
    )
    standby.start()
    try:
        free_since: float | None = None
        while not done.wait(POLL_INTERVAL_S if back else _FAST_POLL_INTERVAL_S):
            if not ownership.available or (back and ownership.requested):
                free_since = None
                continue
            free_since = free_since or time.monotonic()
            if not back or time.monotonic() - free_since > _ABANDONED_S:
                log.info("the drives are free")
                ownership.request()
                return ownership
    finally:
        standby.stop()
    ownership.close()
    return None


class TakeoverWatch:
    """Detects that another sidecar of this node requests the drives."""

    def __init__(self, settings: ServeSettings) -> None:
        paths = [tier.path for tier in settings.config.local]
        self._ownership = DriveOwnership(paths) if settings.allow_takeover else None

    @property
    def is_requested(self) -> bool:
        return self._ownership is not None and self._ownership.requested

    def close(self) -> None:
        if self._ownership is not None:
            self._ownership.close()
