"""Decision whether sidecars may be created or changed, from the preflight results of the nodes. Pure.

A preflight run starts when the preflight spec changes, and ends when every node has reported or the time is up. The
result is kept in status.preflight. A node that fails does not block the others (unless `preflight: Require`): its own
sidecar refuses to start on what it cannot use, and starts once that is fixed. Excluding the node by the DaemonSet's
affinity would restart every sidecar when the node is healthy again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from kvpool_operator.api.pool.status import PreflightFinding, PreflightMeasure, PreflightStatus
from kvpool_operator.preflight.results import (
    MAX_FINDINGS,
    Finding,
    Measurement,
    PreflightRun,
    slowest_measurements,
    to_text,
    worst_findings,
)
from kvpool_operator.text import parse_count
from kvpool_operator.times import elapsed_s, rfc3339

if TYPE_CHECKING:
    from datetime import datetime

__all__ = ["GRACE_S", "WAIT_S", "PreflightResult", "allows"]

WAIT_S: Final = 60.0
"""Longest wait for the first node that passes; images may have to be pulled."""
GRACE_S: Final = 15.0
"""Longest wait for the other nodes after the first one has passed."""


@dataclass(frozen=True)
class PreflightResult:
    """The decision, and the counts and findings that it is based on."""

    state: str
    """Skipped, Checking, Held (checks continue, too few nodes passed), Done, or Unknown (never checked)."""
    is_open: bool
    """Sidecars may be created and changed."""
    spec: str = ""
    since: str = ""
    nodes: int = 0
    passed: int = 0
    failed: int = 0
    findings: tuple[Finding, ...] = ()
    measures: tuple[Measurement, ...] = ()

    @property
    def is_running(self) -> bool:
        """The preflight DaemonSet is needed."""
        return self.state in ("Checking", "Held")

    @property
    def unresponsive(self) -> int:
        """Number of nodes without a result."""
        return max(0, self.nodes - self.passed - self.failed)

    @classmethod
    def evaluate(
        cls,
        policy: str,
        spec: str,
        run: PreflightRun,
        previous: dict[str, Any],
        now: datetime,
        *,
        dry_run: bool = False,
    ) -> PreflightResult:
        """Decide from the results of a run. `previous`: status.preflight; `spec`: digest of the current spec."""
        if policy == "Skip":
            return cls("Skipped", is_open=True)
        known = previous if previous.get("spec") == spec else {}
        if known.get("state") == "Done":
            result = _parse_status(known, policy)
            if result.is_open or dry_run:
                return result
        if run.spec != spec:
            run = PreflightRun()  # results of an older spec
        is_waiting = known.get("state") in ("Checking", "Held")
        since = str(known.get("since", "")) if is_waiting else ""
        age_s = elapsed_s(since, now)
        passed = sum(n.passed is True for n in run.nodes)
        failed = sum(n.passed is False for n in run.nodes)
        nodes = run.desired if run.desired is not None else len(run.nodes)
        is_complete = run.desired is not None and passed + failed >= run.desired
        is_settled = is_complete or age_s > WAIT_S or (age_s > GRACE_S and passed > 0)
        is_open = is_settled and allows(policy, nodes, passed, failed)
        state = "Done" if is_settled and (is_open or dry_run) else "Held" if is_settled else "Checking"
        return cls(
            state,
            is_open,
            spec,
            since or rfc3339(now),
            nodes,
            passed,
            failed,
            worst_findings(run.nodes),
            slowest_measurements(run.nodes),
        )

    @classmethod
    def from_status(cls, policy: str, previous: dict[str, Any]) -> PreflightResult:
        """The last result, for a pool whose checks may not run now. `previous`: status.preflight."""
        if policy == "Skip":
            return cls("Skipped", is_open=True)
        if not previous.get("spec"):
            return cls("Unknown", is_open=False)
        return replace(_parse_status(previous, policy), state=to_text(previous.get("state")) or "Unknown")

    def to_status(self) -> PreflightStatus | None:
        """status.preflight; None if no checks run."""
        if self.state in ("Skipped", "Unknown"):
            return None
        return PreflightStatus(
            spec=self.spec,
            state=self.state,
            since=self.since,
            nodes=self.nodes,
            passed=self.passed,
            failed=self.failed,
            findings=[
                PreflightFinding(
                    node=f.node, check=f.check, level=f.level, tier=f.tier, message=f.message, advice=f.advice
                )
                for f in self.findings
            ],
            measured=[
                PreflightMeasure(
                    tier=m.tier,
                    write_mbps=m.write_mb_s,
                    read_mbps=m.read_mb_s,
                    round_trip_ms=m.round_trip_ms,
                    slowest_node=m.node,
                )
                for m in self.measures
            ],
        )


def allows(policy: str, nodes: int, passed: int, failed: int) -> bool:
    """Whether the policy admits a rollout. `Warn` treats unresponsive nodes as passed."""
    if policy == "Require":
        return passed >= nodes
    return passed > 0 or failed == 0


def _parse_status(previous: dict[str, Any], policy: str) -> PreflightResult:
    """The inverse of `PreflightResult.to_status`, tolerant of edited statuses."""
    nodes, passed, failed = (parse_count(previous.get(k)) for k in ("nodes", "passed", "failed"))
    listed = previous.get("findings")
    findings = tuple(
        Finding(*(to_text(f.get(k)) for k in ("check", "level", "message", "advice", "tier", "node")))
        for f in (listed if isinstance(listed, list) else [])[:MAX_FINDINGS]
        if isinstance(f, dict)
    )
    measured = previous.get("measured")
    measures = tuple(
        Measurement(
            to_text(m.get("tier"))[:64],
            parse_count(m.get("writeMBps")),
            parse_count(m.get("readMBps")),
            parse_count(m.get("roundTripMs")),
            to_text(m.get("slowestNode")),
        )
        for m in (measured if isinstance(measured, list) else [])[:MAX_FINDINGS]
        if isinstance(m, dict)
    )
    is_open = allows(policy, nodes, passed, failed)
    since = to_text(previous.get("since"))
    return PreflightResult("Done", is_open, str(previous["spec"]), since, nodes, passed, failed, findings, measures)
