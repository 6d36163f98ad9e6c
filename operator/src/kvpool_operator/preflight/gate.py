"""Whether sidecars may be made or changed, by what was found on the nodes. Pure.

A look begins when the pool asks for something that was not looked at yet, and ends when every node has answered or the
time is up. What was found stays in status.preflight, which is the memory of it. A node that fails holds up no other
(unless `preflight: Require`): its own sidecar refuses what it cannot live with, and comes up once that is mended,
whereas keeping it away by the DaemonSet's affinity would restart every sidecar when it is well again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from kvpool_operator.text import parse_count
from kvpool_operator.times import rfc3339

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "GRACE_S",
    "MAX_FINDINGS",
    "WAIT_S",
    "Finding",
    "NodePreflight",
    "PreflightResult",
    "PreflightRun",
    "evaluate",
    "from_status",
    "parse",
]

WAIT_S: Final = 60.0
"""Longest wait for the first node that passes; images may have to be pulled."""
GRACE_S: Final = 15.0
"""Longest wait for the others, once one has passed."""
MAX_FINDINGS: Final = 8
_MOST_READ: Final = 64
_TEXT: Final = 300
_LEVELS: Final = ("Fail", "Warn")


@dataclass(frozen=True)
class Finding:
    """Something that is not as it should be on a node. `level`: Fail or Warn."""

    check: str
    level: str
    message: str
    advice: str = ""
    tier: str = ""
    node: str = ""


@dataclass(frozen=True)
class Measurement:
    """What was measured of a tier, of all nodes the worst: MB/s of one stream, milliseconds; 0: not measured."""

    tier: str
    write_mb_s: int = 0
    read_mb_s: int = 0
    round_trip_ms: int = 0
    node: str = ""
    """Where reads were slowest."""


@dataclass(frozen=True)
class NodePreflight:
    """What one node answered. `passed` None: nothing yet."""

    node: str
    passed: bool | None
    findings: tuple[Finding, ...] = ()
    measures: tuple[Measurement, ...] = ()


@dataclass(frozen=True)
class PreflightRun:
    """All nodes. `desired` None: not known yet how many there are. `spec`: what they were asked."""

    desired: int | None = None
    nodes: tuple[NodePreflight, ...] = ()
    spec: str = ""


@dataclass(frozen=True)
class PreflightResult:
    """The decision, and what is told of it."""

    state: str
    """Skipped, Checking, Held (as Checking, but nothing is waited for), Done, or Unknown where nobody looked yet."""
    is_open: bool
    """Sidecars may be made and changed."""
    spec: str = ""
    since: str = ""
    nodes: int = 0
    passed: int = 0
    failed: int = 0
    findings: tuple[Finding, ...] = ()
    measures: tuple[Measurement, ...] = ()

    @property
    def is_running(self) -> bool:
        """The pods that look are wanted."""
        return self.state in ("Checking", "Held")

    @property
    def unresponsive(self) -> int:
        return max(0, self.nodes - self.passed - self.failed)


def parse(raw: Any, node: str) -> NodePreflight:
    """Of a pod's /status. Never raises; what cannot be understood is no answer."""
    told = raw.get("preflight") if isinstance(raw, dict) else None
    if not isinstance(told, dict) or not isinstance(told.get("passed"), bool):
        return NodePreflight(node, None)
    listed = told.get("findings")
    found = [f for f in listed[:_MOST_READ] if isinstance(f, dict)] if isinstance(listed, list) else []
    findings = tuple(
        Finding(
            _text(f.get("check"))[:64] or "Unknown",
            f["level"],
            _text(f.get("message")),
            _text(f.get("advice")),
            _text(f.get("tier"))[:64],
            node,
        )
        for f in found
        if f.get("level") in _LEVELS
    )
    return NodePreflight(node, told["passed"], findings, _measures(found, node))


def evaluate(
    policy: str, spec: str, looks: PreflightRun, told: dict[str, Any], now: datetime, *, dry_run: bool = False
) -> PreflightResult:
    """`told` is status.preflight as it was written last; `spec` what the pool asks for now."""
    if policy == "Skip":
        return PreflightResult("Skipped", is_open=True)
    known = told if told.get("spec") == spec else {}
    if known.get("state") == "Done":
        gate = _remembered(known, policy)
        if gate.is_open or dry_run:
            return gate
    if looks.spec != spec:
        looks = PreflightRun()  # answers to an earlier question
    waiting = known.get("state") in ("Checking", "Held")
    since = str(known.get("since", "")) if waiting else ""
    age = _age(since, now)
    passed = sum(n.passed is True for n in looks.nodes)
    failed = sum(n.passed is False for n in looks.nodes)
    nodes = looks.desired if looks.desired is not None else len(looks.nodes)
    is_all = looks.desired is not None and passed + failed >= looks.desired
    is_settled = is_all or age > WAIT_S or (age > GRACE_S and passed > 0)
    is_open = is_settled and allows(policy, nodes, passed, failed)
    state = "Done" if is_settled and (is_open or dry_run) else "Held" if is_settled else "Checking"
    return PreflightResult(
        state,
        is_open,
        spec,
        since or rfc3339(now),
        nodes,
        passed,
        failed,
        _worst(looks.nodes),
        _slowest(looks.nodes),
    )


def from_status(policy: str, told: dict[str, Any]) -> PreflightResult:
    """What is known already, where nothing may be done to find out more."""
    if policy == "Skip":
        return PreflightResult("Skipped", is_open=True)
    if not told.get("spec"):
        return PreflightResult("Unknown", is_open=False)
    return replace(_remembered(told, policy), state=_text(told.get("state")) or "Unknown")


def allows(policy: str, nodes: int, passed: int, failed: int) -> bool:
    """Of nodes that never answered `Warn` thinks well, for then nothing is known to be wrong."""
    if policy == "Require":
        return passed >= nodes
    return passed > 0 or failed == 0


def _remembered(told: dict[str, Any], policy: str) -> PreflightResult:
    nodes, passed, failed = (parse_count(told.get(k)) for k in ("nodes", "passed", "failed"))
    listed = told.get("findings")
    findings = tuple(
        Finding(*(_text(f.get(k)) for k in ("check", "level", "message", "advice", "tier", "node")))
        for f in (listed if isinstance(listed, list) else [])[:MAX_FINDINGS]
        if isinstance(f, dict)
    )
    measured = told.get("measured")
    measures = tuple(
        Measurement(
            _text(m.get("tier"))[:64],
            parse_count(m.get("writeMBps")),
            parse_count(m.get("readMBps")),
            parse_count(m.get("roundTripMs")),
            _text(m.get("slowestNode")),
        )
        for m in (measured if isinstance(measured, list) else [])[:MAX_FINDINGS]
        if isinstance(m, dict)
    )
    is_open = allows(policy, nodes, passed, failed)
    since = _text(told.get("since"))
    return PreflightResult("Done", is_open, str(told["spec"]), since, nodes, passed, failed, findings, measures)


def _measures(found: list[dict[str, Any]], node: str) -> tuple[Measurement, ...]:
    """By tier, out of the values of findings about one."""
    values: dict[str, dict[str, Any]] = {}
    for f in found:
        tier = _text(f.get("tier"))[:64]
        if tier and isinstance(f.get("values"), dict):
            values.setdefault(tier, {}).update(f["values"])
    made = (
        Measurement(
            tier,
            _whole(v.get("write_mb_s")),
            _whole(v.get("read_mb_s")),
            _whole(v.get("round_trip_ms")),
            node,
        )
        for tier, v in sorted(values.items())[:MAX_FINDINGS]
    )
    return tuple(m for m in made if m.write_mb_s or m.read_mb_s or m.round_trip_ms)


def _slowest(nodes: Sequence[NodePreflight]) -> tuple[Measurement, ...]:
    """Of each tier the slowest writes, the slowest reads and the longest way, over all nodes."""
    by_tier: dict[str, list[Measurement]] = {}
    for m in (m for n in nodes for m in n.measures):
        by_tier.setdefault(m.tier, []).append(m)
    return tuple(
        Measurement(
            tier,
            min((m.write_mb_s for m in some if m.write_mb_s), default=0),
            min((m.read_mb_s for m in some if m.read_mb_s), default=0),
            max(m.round_trip_ms for m in some),
            min(some, key=lambda m: (m.read_mb_s or 2**53, -m.round_trip_ms, m.node)).node,
        )
        for tier, some in sorted(by_tier.items())[:MAX_FINDINGS]
    )


def _worst(nodes: Sequence[NodePreflight]) -> tuple[Finding, ...]:
    """The failures before the warnings; of each kind one node first, so that many alike do not hide another."""
    every = [f for n in sorted(nodes, key=lambda n: n.node) for f in n.findings]
    seen: dict[tuple[str, str], int] = {}
    ranked = []
    for f in every:
        nth = seen[f.check, f.tier] = seen.get((f.check, f.tier), -1) + 1
        ranked.append((f.level != "Fail", nth, f.node, f))
    return tuple(f for *_, f in sorted(ranked, key=lambda r: r[:3])[:MAX_FINDINGS])


def _age(since: str, now: datetime) -> float:
    try:
        return (now - datetime.fromisoformat(since)).total_seconds() if since else 0.0
    except (ValueError, TypeError):
        return 0.0


def _whole(value: Any) -> int:
    """Rounded up, so that what took less than one is not taken for what was not measured."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 2**53:
        return 0
    return math.ceil(value)


def _text(value: Any) -> str:
    return value[:_TEXT] if isinstance(value, str) else ""
