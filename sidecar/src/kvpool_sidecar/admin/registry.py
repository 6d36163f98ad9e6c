"""The kinds of operations, and what they work on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvpool_sidecar.admin.evacuate import Evacuate, Remain
from kvpool_sidecar.admin.preflight import Preflight
from kvpool_sidecar.admin.purge import Purge
from kvpool_sidecar.admin.reload import Reload
from kvpool_sidecar.admin.verify import Verify
from kvpool_sidecar.admin.warm import Warm

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpool.config import PoolConfig
    from kvpool_sidecar.admin.context import Runner
    from kvpool_sidecar.preflight.run import PreflightSettings
    from kvpool_sidecar.replication.drain_source import DrainSource
    from kvpool_sidecar.replication.warm_up import WarmUp
    from kvpool_sidecar.storage.local.store import LocalStore
    from kvpool_sidecar.storage.shared.tier import SharedTier

__all__ = ["OperationDeps", "make_kinds"]


@dataclass(frozen=True)
class OperationDeps:
    """Of the sidecar: what operations may use. Add what yours needs."""

    config: PoolConfig
    secret: bytes
    local: LocalStore
    shared: SharedTier | None
    warm_up: WarmUp | None
    evacuator: DrainSource
    preflight: PreflightSettings
    take_config: Callable[[str], str]


def make_kinds(parts: OperationDeps) -> dict[str, Runner]:
    """By name. A kind is called with its parameters and a Context, in a thread of its own (Operations)."""
    return {
        "purge": Purge(parts.secret, parts.local, parts.shared),
        "evacuate": Evacuate(parts.evacuator),
        "remain": Remain(parts.evacuator),
        "preflight": Preflight(parts.preflight),
        "reload": Reload(parts.take_config),
        "verify": Verify(parts.local, parts.shared),
        "warm": Warm(parts.warm_up),
    }
