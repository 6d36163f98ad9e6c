"""PreflightPassed: the nodes passed the checks that run before a rollout. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvpool_operator.api.conditions import Verdict
from kvpool_operator.api.reasons import Reason

if TYPE_CHECKING:
    from kvpool_operator.pools.conditions.inputs import ConditionInput, PoolCheck
    from kvpool_operator.preflight.gate import PreflightResult
    from kvpool_operator.preflight.results import Finding

__all__ = ["PREFLIGHT_PASSED"]

_MAX_FAILURES: Final = 3
_MAX_WARNINGS: Final = 2


def skipped(i: ConditionInput) -> Verdict | None:
    if i.outcome.preflight.state != "Skipped":
        return None
    return Verdict.unknown(Reason.PREFLIGHT_SKIPPED, "spec.preflight is Skip: no node is checked")


def not_started(i: ConditionInput) -> Verdict | None:
    if i.outcome.preflight.state != "Unknown":
        return None
    return Verdict.unknown(Reason.PREFLIGHT_RUNNING, "the preflight checks have not started")


def running(i: ConditionInput) -> Verdict | None:
    if i.outcome.preflight.state != "Checking":
        return None
    return Verdict.unknown(
        Reason.PREFLIGHT_RUNNING, f"the preflight checks are running: {_passed(i.outcome.preflight)}"
    )


def nodes_failed(i: ConditionInput) -> Verdict | None:
    preflight = i.outcome.preflight
    if not preflight.failed:
        return None
    failures = [_describe(f) for f in preflight.findings if f.level == "Fail"][:_MAX_FAILURES]
    return Verdict.false(Reason.NODES_FAILED, f"{_hold(preflight)}{_passed(preflight)}; {'; '.join(failures)}")


def nodes_unresponsive(i: ConditionInput) -> Verdict | None:
    preflight = i.outcome.preflight
    if not preflight.unresponsive:
        return None
    return Verdict.unknown(
        Reason.NODES_UNRESPONSIVE,
        f"{_hold(preflight)}{_passed(preflight)}, and {preflight.unresponsive} did not report",
    )


def no_matching_nodes(i: ConditionInput) -> Verdict | None:
    if i.outcome.preflight.nodes:
        return None
    return Verdict.unknown(Reason.NO_MATCHING_NODES, "no node matches spec.nodes")


def nodes_passed(i: ConditionInput) -> Verdict:
    warnings = [_describe(f) for f in i.outcome.preflight.findings if f.level == "Warn"][:_MAX_WARNINGS]
    return Verdict.true(Reason.NODES_PASSED, "; ".join([_passed(i.outcome.preflight), *warnings]))


PREFLIGHT_PASSED: Final[tuple[PoolCheck, ...]] = (
    skipped,
    not_started,
    running,
    nodes_failed,
    nodes_unresponsive,
    no_matching_nodes,
    nodes_passed,
)


def _passed(preflight: PreflightResult) -> str:
    return f"{preflight.passed} of {preflight.nodes} nodes passed"


def _hold(preflight: PreflightResult) -> str:
    return "" if preflight.is_open else "nothing is rolled out: "


def _describe(f: Finding) -> str:
    check = f"{f.node}: {f.check}" + (f" {f.tier}" if f.tier else "")
    return f"{check}: {f.message}" + (f" ({f.advice})" if f.advice else "")
