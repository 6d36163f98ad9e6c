"""Where a sidecar is in its life, as /status tells it."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["Phase"]


class Phase(StrEnum):
    """A sidecar serves; where two of one node overlap (kvpool_sidecar.app.takeover) one of them does not."""

    STANDING_BY = "StandingBy"
    """Has asked for the drives and waits."""
    SERVING = "Serving"
    HANDED_OVER = "HandedOver"
    """Has let go of the drives, and would take them back if its successor ended."""
