"""Drives with the given settings, for tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvpool_sidecar.eviction import EvictionConfig
from kvpool_sidecar.storage.local.drive import Drive
from kvpool_sidecar.storage.local.state import DriveSettings

if TYPE_CHECKING:
    from kvpool_sidecar.blocks.events import BlockEvents
    from kvpool_sidecar.tenancy.limits import CapacityLimits

__all__ = ["make_drive"]


def make_drive(
    name: str,
    path: str,
    limits: CapacityLimits,
    *,
    pool_uid: str = "u",
    events: BlockEvents | None = None,
    policy: str = "PrefixAware",
    **settings: Any,
) -> Drive:
    """Open a drive; `policy` names its eviction policy, `settings` are fields of DriveSettings."""
    settings.setdefault("order", EvictionConfig(policy))
    return Drive(name, path, limits, pool_uid=pool_uid, events=events, settings=DriveSettings(**settings))
