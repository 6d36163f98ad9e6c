"""Registry of the operations and their dependencies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvpool_sidecar.admin.confirm_key import ConfirmKeyForgotten
from kvpool_sidecar.admin.evacuate import Evacuate, Remain
from kvpool_sidecar.admin.preflight import Preflight
from kvpool_sidecar.admin.purge import Purge
from kvpool_sidecar.admin.release import Release
from kvpool_sidecar.admin.reload import Reload
from kvpool_sidecar.admin.verify import Verify
from kvpool_sidecar.admin.warm import Warm

if TYPE_CHECKING:
    from kvpool.config import PoolConfig
    from kvpool_sidecar.admin.context import Runner
    from kvpool_sidecar.admin.reload import ConfigTarget
    from kvpool_sidecar.preflight.run import PreflightSettings
    from kvpool_sidecar.replication.drain_source import DrainSource
    from kvpool_sidecar.replication.session_hints import SessionHints
    from kvpool_sidecar.replication.warm_up import WarmUp
    from kvpool_sidecar.storage.local.store import LocalStore
    from kvpool_sidecar.storage.shared.tier import SharedTier

__all__ = ["OperationDeps", "operation_handlers"]


@dataclass(frozen=True)
class OperationDeps:
    """Parts of the sidecar that operations use."""

    config: PoolConfig
    secret: bytes
    local: LocalStore
    shared: SharedTier | None
    warm_up: WarmUp | None
    drain: DrainSource
    preflight: PreflightSettings
    reloader: ConfigTarget
    hints: SessionHints


def operation_handlers(deps: OperationDeps) -> dict[str, Runner]:
    """Return the handlers by kind. Each is called with parameters and Context, in a thread of its own (Operations)."""
    return {
        "purge": Purge(deps.secret, deps.local, deps.shared),
        "confirm-key-forgotten": ConfirmKeyForgotten(deps.secret, deps.shared),
        "evacuate": Evacuate(deps.drain),
        "remain": Remain(deps.drain),
        "preflight": Preflight(deps.preflight),
        "release": Release(deps.secret, deps.hints),
        "reload": Reload(deps.reloader),
        "verify": Verify(deps.local, deps.shared),
        "warm": Warm(deps.warm_up),
    }
