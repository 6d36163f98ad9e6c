"""Conditions of a KVCachePool: one policy chain for each condition type. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvpool_operator.api.conditions import Verdict, first_verdict
from kvpool_operator.pools.conditions.connectivity import INDEX_READY, PEERS_REACHABLE, TRANSPORT_READY
from kvpool_operator.pools.conditions.engines import BLOCKS_SHAREABLE, ENGINES_CONNECTED, INJECTION_READY
from kvpool_operator.pools.conditions.inputs import ConditionInput, ReconcileOutcome
from kvpool_operator.pools.conditions.preflight import PREFLIGHT_PASSED
from kvpool_operator.pools.conditions.ready import READY
from kvpool_operator.pools.conditions.rollout import PROGRESSING, ROLLING_UPDATE_SAFE
from kvpool_operator.pools.conditions.storage import STORAGE_READY

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvpool_operator.pools.conditions.inputs import PoolCheck

__all__ = ["CHAINS", "ConditionInput", "ReconcileOutcome", "evaluate_conditions"]

CHAINS: Final[Mapping[str, tuple[PoolCheck, ...]]] = {
    "Ready": READY,
    "StorageReady": STORAGE_READY,
    "IndexReady": INDEX_READY,
    "InjectionReady": INJECTION_READY,
    "EnginesConnected": ENGINES_CONNECTED,
    "TransportReady": TRANSPORT_READY,
    "PeersReachable": PEERS_REACHABLE,
    "BlocksShareable": BLOCKS_SHAREABLE,
    "PreflightPassed": PREFLIGHT_PASSED,
    "Progressing": PROGRESSING,
    "RollingUpdateSafe": ROLLING_UPDATE_SAFE,
}


def evaluate_conditions(subject: ConditionInput) -> dict[str, Verdict]:
    """The verdict of each chain, by condition type, in the order in which a status shows them."""
    return {kind: first_verdict(chain, subject) for kind, chain in CHAINS.items()}
