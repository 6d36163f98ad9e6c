"""InjectionReady, EnginesConnected, BlocksShareable: engine pods use the pool, and each other's blocks. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvpool_operator.api.conditions import Verdict
from kvpool_operator.api.reasons import Reason
from kvpool_operator.observe.fingerprints import explain, find_gaps
from kvpool_operator.text import summarize_clauses

if TYPE_CHECKING:
    from kvpool_operator.pools.conditions.inputs import ConditionInput, PoolCheck

__all__ = ["BLOCKS_SHAREABLE", "ENGINES_CONNECTED", "INJECTION_READY"]

_MAX_SILENT: Final = 3
_MAX_MESSAGE: Final = 2000


def injection_disabled(i: ConditionInput) -> Verdict | None:
    if i.pool.spec.injection.enabled:
        return None
    return Verdict.false(Reason.DISABLED, "spec.injection.enabled is false: new pods start without the pool")


def webhook_unavailable(i: ConditionInput) -> Verdict | None:
    if not i.snapshot.webhook.problem:
        return None
    return Verdict.false(Reason.WEBHOOK_UNAVAILABLE, f"{i.snapshot.webhook.problem}: new pods start without the pool")


def node_agent_missing(i: ConditionInput) -> Verdict | None:
    """Only the node agent gives engine pods their sockets."""
    nodes = [s.node for s in i.snapshot.sidecars if s.report is not None and not s.report.agent_connected]
    if not nodes:
        return None
    return Verdict.false(
        Reason.NODE_AGENT_MISSING,
        f"no node agent on {summarize_clauses(sorted(nodes), total=len(nodes))}: pods that start there run without the "
        "pool; let the DaemonSet kvpool-agent of the chart run on these nodes",
    )


def pods_not_injected(i: ConditionInput) -> Verdict | None:
    engines = i.snapshot.engines
    if not engines.not_injected:
        return None
    pods = summarize_clauses(engines.not_injected_names, total=engines.not_injected)
    return Verdict.false(
        Reason.PODS_NOT_INJECTED,
        f"{engines.not_injected} opted-in pods were created while the webhook was unavailable or before they opted in, "
        f"and run without the pool; {_remedy(i)}: {pods}",
    )


def all_pods_skipped(i: ConditionInput) -> Verdict | None:
    """No pod is served."""
    engines = i.snapshot.engines
    if engines.injected or not engines.skipped:
        return None
    return Verdict.false(
        Reason.ALL_PODS_SKIPPED,
        f"all {engines.skipped} opted-in pods were skipped{_skips(i)}; their Events say why",
    )


def injecting(i: ConditionInput) -> Verdict:
    engines = i.snapshot.engines
    message = f"{engines.injected} pods were injected, {engines.skipped} were skipped{_skips(i)}"
    if engines.outdated:
        message += f"; {engines.outdated} of them have an older client or configuration and work: {_remedy(i)}"
    return Verdict.true(Reason.INJECTING, message)


INJECTION_READY: Final[tuple[PoolCheck, ...]] = (
    injection_disabled,
    webhook_unavailable,
    node_agent_missing,
    pods_not_injected,
    all_pods_skipped,
    injecting,
)


def engines_silent(i: ConditionInput) -> Verdict | None:
    """Ready pods without a connection, with the plug-in's own sentence where there is one."""
    silent = i.snapshot.connections.silent
    if not silent:
        return None
    named = summarize_clauses([f"{one.pod.full_name}: {one.why}" for one in silent[:_MAX_SILENT]], total=len(silent))
    total = len(silent) + i.snapshot.connections.connected
    return Verdict.false(
        Reason.ENGINES_SILENT, f"{len(silent)} of {total} injected pods run without the pool: {named}"[:_MAX_MESSAGE]
    )


def engines_starting(i: ConditionInput) -> Verdict | None:
    if i.snapshot.connections.connected or not _has_clients(i):
        return None
    return Verdict.unknown(Reason.ENGINES_STARTING, "no engine is connected yet")


def engines_connected(i: ConditionInput) -> Verdict:
    if not _has_clients(i):
        return Verdict.unknown(Reason.NO_ENGINES_INJECTED, "no pod with a client of the pool is running")
    n = i.snapshot.connections.connected
    return Verdict.true(Reason.ENGINES_CONNECTED, f"{n} of {i.snapshot.engines.injected} injected pods are connected")


ENGINES_CONNECTED: Final[tuple[PoolCheck, ...]] = (engines_silent, engines_starting, engines_connected)


def engine_without_remote_tier(i: ConditionInput) -> Verdict | None:
    """Dynamo's KVBM has no remote tier; its blocks cannot be shared."""
    engines = i.snapshot.engines
    if not engines.alone:
        return None
    pods = summarize_clauses(engines.alone_names, total=engines.alone)
    message = (
        f"{pods} run an engine without a remote tier (Dynamo's KVBM): their blocks stay on their nodes; to share "
        "them, run vLLM without KVBM (docs/how-to/engines/dynamo.md)"
    )
    return Verdict.false(Reason.NO_REMOTE_TIER, "; ".join([message, *_gaps(i)]))


def fingerprints_differ(i: ConditionInput) -> Verdict | None:
    gaps = _gaps(i)
    return Verdict.false(Reason.FINGERPRINTS_DIFFER, "; ".join(gaps)) if gaps else None


def engine_status_unavailable(i: ConditionInput) -> Verdict | None:
    if i.reports:
        return None
    return Verdict.unknown(Reason.STATUS_UNAVAILABLE, "no sidecar has reported the engines that it serves")


def no_engines_connected(i: ConditionInput) -> Verdict | None:
    if any(group.in_use_by for group in i.fingerprint_groups):
        return None
    return Verdict.unknown(Reason.NO_ENGINES_CONNECTED, "no engine is connected")


def fingerprints_match(i: ConditionInput) -> Verdict:
    models = len({group.model for group in i.fingerprint_groups if group.in_use_by})
    return Verdict.true(Reason.FINGERPRINTS_MATCH, f"the engines of each of {models} models share their blocks")


BLOCKS_SHAREABLE: Final[tuple[PoolCheck, ...]] = (
    engine_without_remote_tier,
    fingerprints_differ,
    engine_status_unavailable,
    no_engines_connected,
    fingerprints_match,
)


def _has_clients(i: ConditionInput) -> bool:
    return any(pod.state == "injected" and pod.has_client and not pod.leaving for pod in i.snapshot.engines.pods)


def _skips(i: ConditionInput) -> str:
    reasons = [f"{reason} ({n})" for reason, n in i.snapshot.engines.skip_reasons.items()]
    return f": {', '.join(reasons)}" if reasons else ""


def _remedy(i: ConditionInput) -> str:
    if i.outcome.eviction_problem:
        return i.outcome.eviction_problem
    evicts = i.pool.spec.injection.watchdog == "Restart" and i.pool.spec.mode == "Enforce"
    return "the operator evicts them one at a time, so that their owners recreate them" if evicts else "recreate them"


def _gaps(i: ConditionInput) -> list[str]:
    by_digest = {group.digest: group for group in i.fingerprint_groups}
    return [explain(gap, by_digest) for gap in find_gaps(i.fingerprint_groups)]
