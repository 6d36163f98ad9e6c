"""Findings from the pool's conditions: reasons that name one cause. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvpool_operator.api.findings.codes import Code
from kvpool_operator.api.reasons import Reason
from kvpool_operator.diagnosis.finding import make

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvpool_operator.diagnosis.finding import PoolFinding
    from kvpool_operator.diagnosis.observed import Observed

__all__ = ["from_conditions"]

_DIRECT: Final = {
    Reason.NO_MATCHING_NODES: Code.NO_MATCHING_NODES,
    Reason.NODES_NOT_READY: Code.NODES_NOT_READY,
    Reason.POD_CREATION_FAILED: Code.SIDECARS_REJECTED,
    Reason.DRIVE_ERRORS: Code.DRIVE_ERRORS,
    Reason.SHARED_TIER_UNAVAILABLE: Code.SHARED_TIER_UNAVAILABLE,
    Reason.INDEX_NOT_RUNNING: Code.INDEX_NOT_RUNNING,
    Reason.NODES_NOT_CONNECTED: Code.INDEX_NOT_CONNECTED,
    Reason.INVALID_INDEX_CONFIG: Code.INVALID_INDEX_CONFIG,
    Reason.PROTOCOL_MISMATCH: Code.TRANSPORT_DIFFERS,
    Reason.PEERS_UNREACHABLE: Code.PEERS_UNREACHABLE,
    Reason.DISABLED: Code.INJECTION_DISABLED,
    Reason.WEBHOOK_UNAVAILABLE: Code.WEBHOOK_UNAVAILABLE,
    Reason.NODE_AGENT_MISSING: Code.NODE_AGENT_MISSING,
    Reason.NO_REMOTE_TIER: Code.NO_REMOTE_TIER,
    Reason.ROLLOUT_STUCK: Code.ROLLOUT_STUCK,
    Reason.REJECTED: Code.REJECTED,
}
"""Reasons whose message is the finding. Pods and fingerprints have analyzers of their own, with an object each."""
_SUMMARIES: Final = frozenset({"Ready", "RollingUpdateSafe", "PreflightPassed"})
"""Conditions that repeat others."""


def from_conditions(i: Observed) -> Iterator[PoolFinding]:
    """One finding for each reason of a condition that is not True."""
    for kind, verdict in i.verdicts.items():
        repeats = kind in _SUMMARIES and verdict.reason is not Reason.REJECTED
        code = _DIRECT.get(verdict.reason)
        if code is not None and not repeats and (not verdict.is_true or verdict.reason is Reason.ROLLOUT_STUCK):
            yield make(code, i.subject, verdict.message)
