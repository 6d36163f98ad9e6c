"""A landing zone over a drive in a directory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpool_sidecar.storage.landing.ledger import Share
from kvpool_sidecar.storage.landing.zone import LandingZone
from kvpool_sidecar.storage.local.store import LocalStore
from kvpool_sidecar.tenancy import limits as quota
from kvpool_testing.drives import make_drive

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20


def make_zone(
    path: Path, *, capacity: int = 64 * MIB, buffer: int = 16 * MIB, places: int = 64, **zone_settings
) -> tuple[LandingZone, LocalStore]:
    """A zone and the scanned store below it. The caller stops the zone and closes the store."""
    drive = make_drive("nvme", str(path), quota.CapacityLimits(capacity, 85, 75, 1000), pool_uid="u")
    drive.scan()
    local = LocalStore([drive])
    return LandingZone(local, Share(places, buffer), **zone_settings), local
