"""What a pool's status says about the look at its nodes. Pure; `status` puts it in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpool_operator.api.pool.status import PreflightFinding, PreflightMeasure, PreflightStatus
from kvpool_operator.api.reasons import Reason

if TYPE_CHECKING:
    from kvpool_operator.preflight.gate import Finding, PreflightResult

__all__ = ["preflight_status", "preflight_verdict"]


def preflight_status(gate: PreflightResult) -> PreflightStatus | None:
    """None where nobody looks."""
    if gate.state in ("Skipped", "Unknown"):
        return None
    return PreflightStatus(
        spec=gate.spec,
        state=gate.state,
        since=gate.since,
        nodes=gate.nodes,
        passed=gate.passed,
        failed=gate.failed,
        findings=[
            PreflightFinding(node=f.node, check=f.check, level=f.level, tier=f.tier, message=f.message, advice=f.advice)
            for f in gate.findings
        ],
        measured=[
            PreflightMeasure(
                tier=m.tier,
                write_mbps=m.write_mb_s,
                read_mbps=m.read_mb_s,
                round_trip_ms=m.round_trip_ms,
                slowest_node=m.node,
            )
            for m in gate.measures
        ],
    )


def preflight_verdict(gate: PreflightResult) -> tuple[bool | None, Reason, str]:
    """Status, reason and message of the condition PreflightPassed."""
    if gate.state == "Skipped":
        return None, Reason.PREFLIGHT_SKIPPED, "spec.preflight is Skip: no node was looked at"
    if gate.state == "Unknown":
        return None, Reason.PREFLIGHT_RUNNING, "the nodes were not looked at yet"
    counted = f"{gate.passed} of {gate.nodes} nodes passed"
    if gate.state == "Checking":
        return None, Reason.PREFLIGHT_RUNNING, f"the nodes are being looked at: {counted}"
    worst = [_sentence(f) for f in gate.findings if f.level == "Fail"][:3]
    warned = [_sentence(f) for f in gate.findings if f.level == "Warn"][:2]
    if gate.failed:
        held = "" if gate.is_open else "nothing is rolled out: "
        return False, Reason.NODES_FAILED, f"{held}{counted}; {'; '.join(worst)}"
    if gate.unresponsive:
        held = "" if gate.is_open else "nothing is rolled out: "
        return None, Reason.NODES_UNRESPONSIVE, f"{held}{counted}, and {gate.unresponsive} did not answer"
    if not gate.nodes:
        return None, Reason.NO_MATCHING_NODES, "no node fits spec.nodes"
    told = f"; {'; '.join(warned)}" if warned else ""
    return True, Reason.NODES_PASSED, f"{counted}{told}"


def _sentence(f: Finding) -> str:
    where = f"{f.node}: {f.check}" + (f" {f.tier}" if f.tier else "")
    return f"{where}: {f.message}" + (f" ({f.advice})" if f.advice else "")
