"""State machine of a node's drain: which signal starts it, and which command follows. Pure.

The signal is on the Node: a cordon, or a taint of Cluster Autoscaler (ToBeDeletedByClusterAutoscaler,
DeletionCandidateOfClusterAutoscaler) or Karpenter (karpenter.sh/disrupted; karpenter.sh/disruption before its v1).
Nothing here ever blocks a drain: blocks are a cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Final, Literal

from kvpool_operator.api.node import DrainStatus
from kvpool_operator.api.quantity import format_bytes

if TYPE_CHECKING:
    from kvpool_operator.api.node import DrainState
    from kvpool_operator.k8s.client import Manifest
    from kvpool_operator.sidecars.status import DrainReport

__all__ = ["Command", "DrainSettings", "NodeDrainSignal", "drain_signal", "next_state", "on_node_removed"]

Command = Literal["evacuate", "remain"]

_BY_OPERATION: Final = "a KVCacheOperation moves its blocks off"
_TAINTS: Final = {
    "ToBeDeletedByClusterAutoscaler": "Cluster Autoscaler removes it",
    "DeletionCandidateOfClusterAutoscaler": "Cluster Autoscaler may remove it soon",
    "karpenter.sh/disrupted": "Karpenter removes it",
    "karpenter.sh/disruption": "Karpenter removes it",
}


@dataclass(frozen=True)
class NodeDrainSignal:
    """Whether a node leaves. `reason`: why; empty if the node stays."""

    reason: str = ""


@dataclass(frozen=True)
class DrainSettings:
    """spec.nodes.drain of a pool."""

    evacuate: bool
    timeout_s: float


def drain_signal(node: Manifest) -> NodeDrainSignal:
    """The drain signal of a Node."""
    spec = node.get("spec") or {}
    taints = {str(t.get("key")) for t in spec.get("taints") or []}
    reasons = [reason for key, reason in _TAINTS.items() if key in taints]
    if not reasons and spec.get("unschedulable"):
        reasons = ["it is cordoned"]
    return NodeDrainSignal(reasons[0] if reasons else "")


def next_state(
    old: DrainStatus, reason: str, policy: DrainSettings, report: DrainReport | None, now: str
) -> tuple[DrainStatus, Command | None]:
    """The drain's next state, and the command for the sidecar. `report` is None while the sidecar does not answer.

    `now` is RFC 3339. Idempotent: the result depends on the current observation and on the start of the drain only.
    """
    is_draining = report is not None and report.leaving and report.by_node
    if not reason:
        once = report is not None and report.leaving and not report.by_node
        return _operation_drain(old, report, now) if once and report is not None else DrainStatus(), (
            "remain" if is_draining else None
        )
    if old.reason == _BY_OPERATION:
        old = DrainStatus()
    start = old.start_time if old.state != "None" and old.start_time else now
    was_drained = old.state == "Drained"
    base = _with_counts(old, report).model_copy(update={"reason": reason[:253], "start_time": start})
    if not policy.evacuate:
        return _finished(base, old, "Abandoned", "the pool's drain policy is Abandon: nothing is moved", now), (
            "remain" if is_draining else None
        )
    if report is not None and is_draining and report.clean:
        return _finished(base, old, "Drained", "", now), None
    if not was_drained and _elapsed_s(start, now) >= policy.timeout_s:
        message = "the drain timed out; the remaining blocks are recomputed on their next use"
        return _finished(base, old, "Abandoned", message, now), "remain" if is_draining else None
    if was_drained:  # a newer block is in transfer, or the sidecar restarted
        return _finished(
            base, old, "Drained", base.message, now
        ), "evacuate" if report is not None and not is_draining else None
    if report is None:
        return _in_progress(base, "Requested", "the sidecar does not answer"), None
    if not is_draining:
        return _in_progress(base, "Requested", ""), "evacuate"
    return _in_progress(base, "Evacuating", report.problem), None


def _operation_drain(old: DrainStatus, report: DrainReport, now: str) -> DrainStatus:
    """An operation moves the blocks once; the node stays."""
    start = old.start_time if old.reason == _BY_OPERATION else now
    base = _with_counts(old, report).model_copy(update={"reason": _BY_OPERATION, "start_time": start})
    return (
        _finished(base, old, "Drained", "", now) if report.clean else _in_progress(base, "Evacuating", report.problem)
    )


def on_node_removed(old: DrainStatus, now: str) -> DrainStatus:
    """The drain of a node that no longer exists: a drain in progress has ended."""
    if old.state not in ("Requested", "Evacuating"):
        return old
    return _finished(old, old, "Abandoned", "the node was removed before all blocks were moved", now)


def _with_counts(old: DrainStatus, report: DrainReport | None) -> DrainStatus:
    """Moved and remaining blocks as reported; unchanged if the sidecar does not report them."""
    if report is None or not report.leaving:
        return old
    return DrainStatus(
        moved_blocks=report.moved_blocks,
        moved=format_bytes(report.moved_bytes),
        remaining_blocks=report.remaining_blocks,
        remaining=format_bytes(report.remaining_bytes),
        message=report.problem,
    )


def _in_progress(base: DrainStatus, state: DrainState, message: str) -> DrainStatus:
    return base.model_copy(update={"state": state, "message": message, "end_time": ""})


def _finished(base: DrainStatus, old: DrainStatus, state: DrainState, message: str, now: str) -> DrainStatus:
    end = old.end_time if old.state == state and old.end_time else now
    return base.model_copy(update={"state": state, "message": message, "end_time": end})


def _elapsed_s(since: str, now: str) -> float:
    try:
        return (datetime.fromisoformat(now) - datetime.fromisoformat(since)).total_seconds()
    except (ValueError, TypeError):
        return 0.0
