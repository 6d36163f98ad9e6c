"""Progressing and RollingUpdateSafe: whether a rollout runs, and whether one now would keep the cache. Pure.

A sidecar that is replaced finds its blocks on its drives, and the index keeps their entries: they name the node's
number and the drive's generation, which stay the same. Each check of RollingUpdateSafe is an exception to that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvpool_operator.api.conditions import Verdict, first_verdict
from kvpool_operator.api.reasons import Reason
from kvpool_operator.desired import names
from kvpool_operator.desired.rollout import has_ephemeral_volumes
from kvpool_operator.pools.conditions.connectivity import INDEX_READY
from kvpool_operator.pools.conditions.inputs import is_status_current
from kvpool_operator.pools.conditions.preflight import PREFLIGHT_PASSED
from kvpool_operator.text import summarize_clauses

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpool_operator.observe.snapshot import Snapshot
    from kvpool_operator.pools.conditions.inputs import ConditionInput, PoolCheck
    from kvpool_operator.sidecars.status import SidecarStatus

__all__ = ["BLOCK_FORMATS", "PROGRESSING", "ROLLING_UPDATE_SAFE", "api_rejections"]

BLOCK_FORMATS: Final = (1, 2, 3, 4)
"""Versions of the block format that the sidecars of this release read (kvpool.protocol.block)."""
_REGISTRATION_BATCH: Final = 256
"""Blocks that a sidecar registers in the index in one batch."""
_MAX_REJECTIONS: Final = 900


def deleting(i: ConditionInput) -> Verdict | None:
    if not i.pool.metadata.deletion_timestamp:
        return None
    waiting = i.outcome.waiting
    return Verdict.true(Reason.DELETING, f"waiting for {waiting}" if waiting else "deleting the pool's objects")


def paused(i: ConditionInput) -> Verdict | None:
    if i.pool.spec.mode != "Paused":
        return None
    return Verdict.false(Reason.PAUSED, "spec.mode is Paused: the operator changes nothing")


def api_rejections(i: ConditionInput) -> Verdict | None:
    """The API server rejected an object of the pool."""
    if not i.outcome.rejections:
        return None
    messages = "; ".join(i.outcome.rejections)[:_MAX_REJECTIONS]
    return Verdict.false(Reason.REJECTED, f"the API server rejected changes: {messages}")


def dry_run(i: ConditionInput) -> Verdict | None:
    if i.pool.spec.mode != "DryRun" or i.outcome.waiting:
        return None
    configmap = names.plan(i.pool.metadata.name)
    return Verdict.false(
        Reason.DRY_RUN, f"spec.mode is DryRun: ConfigMap {configmap} lists what would be created, changed and deleted"
    )


def blocked_by_index_config(i: ConditionInput) -> Verdict | None:
    if not i.snapshot.external_problem:
        return None
    return Verdict.false(Reason.INVALID_INDEX_CONFIG, f"nothing is changed: {i.snapshot.external_problem}")


def applying(i: ConditionInput) -> Verdict | None:
    if not i.outcome.applied and not i.outcome.waiting:
        return None
    waiting = i.outcome.waiting
    return Verdict.true(
        Reason.APPLYING, f"waiting for {waiting}" if waiting else f"{i.outcome.applied} objects were updated"
    )


def held_by_preflight(i: ConditionInput) -> Verdict | None:
    """Too few nodes passed the preflight checks, so nothing is rolled out."""
    if i.outcome.preflight.state != "Held":
        return None
    preflight = first_verdict(PREFLIGHT_PASSED, i)
    return Verdict.false(preflight.reason, preflight.message)


def rollout_stuck(i: ConditionInput) -> Verdict | None:
    """New sidecars do not take over from those that serve."""
    if not _is_rolling_out(i):
        return None
    causes = _successor_problems(i.snapshot)
    if not causes:
        return None
    advice = "the old sidecars serve; on nodes without room for two, set spec.nodes.update.surge: false"
    return Verdict.true(Reason.ROLLOUT_STUCK, f"{_updated(i)}; {summarize_clauses(causes)}; {advice}")


def rolling_out(i: ConditionInput) -> Verdict | None:
    return Verdict.true(Reason.ROLLING_OUT, _updated(i)) if _is_rolling_out(i) else None


def up_to_date(_: ConditionInput) -> Verdict:
    return Verdict.false(Reason.UP_TO_DATE, "the cluster matches the spec")


PROGRESSING: Final[tuple[PoolCheck, ...]] = (
    deleting,
    paused,
    api_rejections,
    dry_run,
    blocked_by_index_config,
    applying,
    held_by_preflight,
    rollout_stuck,
    rolling_out,
    up_to_date,
)


def update_status_unavailable(i: ConditionInput) -> Verdict | None:
    if i.reports:
        return None
    return Verdict.unknown(Reason.STATUS_UNAVAILABLE, "no sidecar has reported its blocks")


def nodes_not_ready(i: ConditionInput) -> Verdict | None:
    """Replacing sidecars while others are not ready would take further nodes away."""
    sidecars, desired = i.snapshot.sidecars, i.nodes.desired
    not_ready = sorted(s.node or "a node" for s in sidecars if not s.ready or s.report is None)
    if not not_ready and len(sidecars) >= desired:
        return None
    nodes = summarize_clauses(not_ready) or f"{desired - len(sidecars)} nodes"
    return Verdict.false(Reason.NODES_NOT_READY, f"{nodes}: not ready; a rollout would take further nodes away")


def format_unknown(i: ConditionInput) -> Verdict | None:
    """Sidecars run a newer release, whose block format this release cannot read."""
    newer = _nodes_where(i, lambda r: bool(set(r.block_formats) - set(BLOCK_FORMATS)))
    if not newer:
        return None
    return Verdict.false(
        Reason.FORMAT_UNKNOWN,
        f"{summarize_clauses(newer)}: these sidecars use a newer block format than this release reads; blocks in it "
        "would be misses",
    )


def index_unavailable(i: ConditionInput) -> Verdict | None:
    if first_verdict(INDEX_READY, i).is_true:
        return None
    return Verdict.false(
        Reason.INDEX_NOT_RUNNING, "the index is unavailable, so peers could not find the blocks of a restarted node"
    )


def index_not_synced(i: ConditionInput) -> Verdict | None:
    behind = _nodes_where(i, _is_behind)
    if not behind:
        return None
    return Verdict.false(
        Reason.INDEX_NOT_SYNCED,
        f"the index does not have all blocks of these nodes yet: {summarize_clauses(behind)}",
    )


def ephemeral_volumes(i: ConditionInput) -> Verdict | None:
    if not has_ephemeral_volumes(i.pool):
        return None
    return Verdict.false(
        Reason.EPHEMERAL_VOLUMES, "a replaced sidecar starts with an empty volume: its blocks are lost with its pod"
    )


def cache_preserved(i: ConditionInput) -> Verdict:
    """The message has no number that changes all the time, because a changed message is written immediately."""
    at_once = i.pool.spec.nodes.update.max_unavailable
    return Verdict.true(
        Reason.CACHE_PRESERVED,
        f"blocks stay on their drives and in the index while sidecars are replaced, {at_once} at a time",
    )


ROLLING_UPDATE_SAFE: Final[tuple[PoolCheck, ...]] = (
    update_status_unavailable,
    nodes_not_ready,
    format_unknown,
    index_unavailable,
    index_not_synced,
    ephemeral_volumes,
    cache_preserved,
)


def _is_rolling_out(i: ConditionInput) -> bool:
    return i.daemonset is not None and (not is_status_current(i.daemonset) or i.nodes.updated < i.nodes.desired)


def _updated(i: ConditionInput) -> str:
    return f"{i.nodes.updated} of {i.nodes.desired} nodes run the current spec"


def _successor_problems(snapshot: Snapshot) -> list[str]:
    """Why new sidecars do not take over from those that serve; empty if no cause is known."""
    if snapshot.successor_rejection:
        return [f"the API server rejects the new sidecars' pods: {snapshot.successor_rejection}"]
    return sorted(
        f"{s.node or 'a node'}: new sidecar: {s.successor_problem}" for s in snapshot.sidecars if s.successor_problem
    )


def _nodes_where(i: ConditionInput, matches: Callable[[SidecarStatus], bool]) -> list[str]:
    return sorted(s.node or "a node" for s in i.snapshot.sidecars if s.report is not None and matches(s.report))


def _is_behind(report: SidecarStatus) -> bool:
    """Whether more than a tenth of the blocks is missing in the index; blocks come and go all the time."""
    return not report.scanned or report.index_announced < report.blocks - report.blocks // 10 - _REGISTRATION_BATCH
