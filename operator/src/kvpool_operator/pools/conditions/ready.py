"""Ready: the sidecars serve and the index is available. Also the phase, which sums the conditions up. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvpool_operator.api.conditions import Verdict, first_verdict
from kvpool_operator.api.reasons import Reason
from kvpool_operator.pools.conditions.connectivity import INDEX_READY, invalid_index_config, peers_clause
from kvpool_operator.pools.conditions.rollout import api_rejections
from kvpool_operator.pools.conditions.storage import STORAGE_READY

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvpool_operator.api.pool.status import Phase
    from kvpool_operator.pools.conditions.inputs import ConditionInput, PoolCheck

__all__ = ["READY", "phase_of"]


def storage_not_ready(i: ConditionInput) -> Verdict | None:
    return _unless_true(first_verdict(STORAGE_READY, i))


def index_not_ready(i: ConditionInput) -> Verdict | None:
    return _unless_true(first_verdict(INDEX_READY, i))


def serving(i: ConditionInput) -> Verdict:
    return Verdict.true(Reason.SERVING, f"{i.nodes.ready} nodes serve{peers_clause(i)}")


READY: Final[tuple[PoolCheck, ...]] = (
    api_rejections,
    invalid_index_config,  # before the storage, because it keeps sidecars from being created
    storage_not_ready,
    index_not_ready,
    serving,
)


def phase_of(i: ConditionInput, verdicts: Mapping[str, Verdict]) -> Phase:
    """One word for `kubectl get`; programs read the conditions."""
    progressing = verdicts["Progressing"].is_true
    if i.pool.metadata.deletion_timestamp:
        return "Deleting"
    if i.pool.spec.mode == "Paused":
        return "Paused"
    if i.outcome.rejections:
        return "Failed"
    if i.pool.spec.mode == "DryRun":
        return "DryRun"
    if verdicts["Ready"].is_true:
        return "Updating" if progressing else "Ready"
    if i.snapshot.status.get("phase") in ("Ready", "Degraded", "Updating"):
        return "Updating" if progressing else "Degraded"
    return "Provisioning" if i.snapshot.objects else "Pending"


def _unless_true(verdict: Verdict) -> Verdict | None:
    return None if verdict.is_true else Verdict.false(verdict.reason, verdict.message)
