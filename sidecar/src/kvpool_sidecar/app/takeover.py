"""Two sidecars of one node during a roll: the new one is started beside the old one, which hands its drives over.

    new:  standing by, asks  ->  serves
    old:  serves  ->  lets go when asked, and waits: if the new one ends, it takes the drives back and serves again

So a node's engines miss for as long as a hand-over takes, not for as long as a pod's replacement does, and a release
that cannot serve leaves the node with the one before.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from kvpool_sidecar.app.standby_http import StandbyServer
from kvpool_sidecar.observability.phase import Phase
from kvpool_sidecar.storage.local.ownership import DriveOwnership

if TYPE_CHECKING:
    import threading

    from kvpool_sidecar.settings import ServeSettings

__all__ = ["LOOK_S", "TakeoverWatch", "wait_for_turn"]

log = logging.getLogger(__name__)

LOOK_S = 0.1
_LOOK_SOON_S = 0.02  # while engines wait for it
_ASK_S = 10.0  # then the old one must go another way: a release that does not know how to hand over, or one that hangs
_ABANDONED_S = 1.0  # drives that nobody has, and nobody wants, for so long


def wait_for_turn(settings: ServeSettings, done: threading.Event, *, back: bool) -> DriveOwnership | None:
    """Wait until nobody serves from the drives; None if `done` came first. Close what is returned once they are ours.

    `back`: we had them, and another one asked for them: wait until that one has ended.
    """
    phase = Phase.HANDED_OVER if back else Phase.STANDING_BY
    turns = DriveOwnership([tier.path for tier in settings.config.local])
    if not back:
        turns.request()
        if turns.available:
            return turns
    log.info("another sidecar has this node's drives: %s", phase.value)
    began = time.monotonic()
    stand_in = StandbyServer(
        settings.address,
        settings.config.http_port,
        settings.node,
        phase,
        ready=lambda: back or time.monotonic() - began > _ASK_S,
    )
    stand_in.start()
    try:
        free_since: float | None = None
        while not done.wait(LOOK_S if back else _LOOK_SOON_S):
            if not turns.available or (back and turns.requested):
                free_since = None
                continue
            free_since = free_since or time.monotonic()
            if not back or time.monotonic() - free_since > _ABANDONED_S:
                log.info("the drives are free")
                turns.request()
                return turns
    finally:
        stand_in.stop()
    turns.close()
    return None


class TakeoverWatch:
    """Whether another sidecar of this node wants the drives that we serve from."""

    def __init__(self, settings: ServeSettings) -> None:
        self._turns = DriveOwnership([tier.path for tier in settings.config.local]) if settings.allow_takeover else None

    @property
    def is_waiting(self) -> bool:
        return self._turns is not None and self._turns.requested

    def close(self) -> None:
        if self._turns is not None:
            self._turns.close()
