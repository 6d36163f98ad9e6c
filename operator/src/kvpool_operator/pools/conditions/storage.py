"""StorageReady: every desired node has a sidecar that serves all tiers. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvpool_operator.api.conditions import Verdict, first_verdict
from kvpool_operator.api.reasons import Reason
from kvpool_operator.pools.conditions.inputs import is_status_current
from kvpool_operator.pools.conditions.preflight import PREFLIGHT_PASSED
from kvpool_operator.text import summarize_clauses

if TYPE_CHECKING:
    from kvpool_operator.pools.conditions.inputs import ConditionInput, PoolCheck

__all__ = ["STORAGE_READY"]


def not_created(i: ConditionInput) -> Verdict | None:
    """The DaemonSet does not exist: it is held back by the mode or by preflight checks, or it is being created."""
    if i.daemonset is not None or i.snapshot.rejection:
        return None
    if i.pool.spec.mode == "DryRun":
        return Verdict.false(Reason.DRY_RUN, "spec.mode is DryRun: no sidecars are created")
    if i.outcome.preflight.is_running:
        preflight = first_verdict(PREFLIGHT_PASSED, i)
        return Verdict.false(preflight.reason, preflight.message)
    return Verdict.false(Reason.NOT_CREATED, "the sidecars are being created")


def status_outdated(i: ConditionInput) -> Verdict | None:
    """The DaemonSet controller has not processed the current spec yet."""
    if i.daemonset is None or is_status_current(i.daemonset):
        return None
    return Verdict.false(Reason.NOT_CREATED, "the sidecars are being created")


def pods_rejected(i: ConditionInput) -> Verdict | None:
    """The API server rejects the pods, for example because of Pod Security or a quota."""
    if not i.snapshot.rejection:
        return None
    return Verdict.false(
        Reason.POD_CREATION_FAILED,
        f"the API server rejects the sidecars' pods: {i.snapshot.rejection}; if Pod Security is enforced, label the "
        "pool's namespace pod-security.kubernetes.io/enforce=privileged",
    )


def no_matching_nodes(i: ConditionInput) -> Verdict | None:
    if i.nodes.desired:
        return None
    return Verdict.false(
        Reason.NO_MATCHING_NODES, "no node matches spec.nodes; check spec.nodes.selector and spec.nodes.tolerations"
    )


def nodes_not_ready(i: ConditionInput) -> Verdict | None:
    if i.nodes.ready >= i.nodes.desired:
        return None
    causes = [f"{s.node or 'a pod'}: {s.problem or 'not ready yet'}" for s in i.snapshot.sidecars if not s.ready]
    causes = sorted(causes) or ["some pods do not exist yet"]
    return Verdict.false(
        Reason.NODES_NOT_READY, f"{i.nodes.ready} of {i.nodes.desired} nodes serve; {summarize_clauses(causes)}"
    )


def drive_errors(i: ConditionInput) -> Verdict | None:
    drives = [
        f"{s.node}: {', '.join(s.report.failing_drives)}"
        for s in i.snapshot.sidecars
        if s.report and s.report.failing_drives
    ]
    if not drives:
        return None
    return Verdict.false(
        Reason.DRIVE_ERRORS,
        f"drives return I/O errors and are bypassed: {summarize_clauses(sorted(drives))}; replace or repair them",
    )


def shared_tier_unavailable(i: ConditionInput) -> Verdict | None:
    problems = [
        f"{s.node}: {s.report.shared_problem}" for s in i.snapshot.sidecars if s.report and s.report.shared_problem
    ]
    if not problems:
        return None
    return Verdict.false(
        Reason.SHARED_TIER_UNAVAILABLE,
        f"the shared tier is unavailable on {len(problems)} nodes; {summarize_clauses(sorted(problems))}",
    )


def all_nodes_ready(i: ConditionInput) -> Verdict:
    return Verdict.true(Reason.ALL_NODES_READY, f"{i.nodes.ready} of {i.nodes.desired} nodes serve")


STORAGE_READY: Final[tuple[PoolCheck, ...]] = (
    not_created,
    status_outdated,
    pods_rejected,
    no_matching_nodes,
    nodes_not_ready,
    drive_errors,
    shared_tier_unavailable,
    all_nodes_ready,
)
