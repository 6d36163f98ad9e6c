"""Results of the preflight checks of each node, and their summary over all nodes. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "MAX_FINDINGS",
    "Finding",
    "Measurement",
    "NodePreflight",
    "PreflightRun",
    "parse",
    "slowest_measurements",
    "to_text",
    "worst_findings",
]

MAX_FINDINGS: Final = 8
_MAX_PARSED: Final = 64
_MAX_TEXT: Final = 300
_MAX_TIER: Final = 64
_LEVELS: Final = ("Fail", "Warn")


@dataclass(frozen=True)
class Finding:
    """A problem on a node. `level`: Fail or Warn."""

    check: str
    level: str
    message: str
    advice: str = ""
    tier: str = ""
    node: str = ""


@dataclass(frozen=True)
class Measurement:
    """Throughput of one stream (MB/s) and round trip time (ms) of a tier; 0: not measured."""

    tier: str
    write_mb_s: int = 0
    read_mb_s: int = 0
    round_trip_ms: int = 0
    node: str = ""
    """The node with the slowest reads."""


@dataclass(frozen=True)
class NodePreflight:
    """Result of one node. `passed` is None until the node reports."""

    node: str
    passed: bool | None
    findings: tuple[Finding, ...] = ()
    measures: tuple[Measurement, ...] = ()


@dataclass(frozen=True)
class PreflightRun:
    """Results of all nodes. `desired` is None while the number of nodes is unknown."""

    desired: int | None = None
    nodes: tuple[NodePreflight, ...] = ()
    spec: str = ""
    """Digest of the preflight spec that the nodes were checked against."""


def parse(raw: Any, node: str) -> NodePreflight:
    """Parse the preflight section of a pod's /status. Never raises; an invalid section counts as no result."""
    section = raw.get("preflight") if isinstance(raw, dict) else None
    if not isinstance(section, dict) or not isinstance(section.get("passed"), bool):
        return NodePreflight(node, None)
    listed = section.get("findings")
    entries = [f for f in listed[:_MAX_PARSED] if isinstance(f, dict)] if isinstance(listed, list) else []
    findings = tuple(
        Finding(
            to_text(f.get("check"))[:64] or "Unknown",
            f["level"],
            to_text(f.get("message")),
            to_text(f.get("advice")),
            to_text(f.get("tier"))[:_MAX_TIER],
            node,
        )
        for f in entries
        if f.get("level") in _LEVELS
    )
    return NodePreflight(node, section["passed"], findings, _measurements(entries, node))


def worst_findings(nodes: Sequence[NodePreflight]) -> tuple[Finding, ...]:
    """Failures before warnings; of each kind one node first, so that a common problem does not hide another one."""
    seen: dict[tuple[str, str], int] = {}
    ranked = []
    for f in (f for n in sorted(nodes, key=lambda n: n.node) for f in n.findings):
        nth = seen[f.check, f.tier] = seen.get((f.check, f.tier), -1) + 1
        ranked.append((f.level != "Fail", nth, f.node, f))
    return tuple(f for *_, f in sorted(ranked, key=lambda r: r[:3])[:MAX_FINDINGS])


def slowest_measurements(nodes: Sequence[NodePreflight]) -> tuple[Measurement, ...]:
    """For each tier the slowest writes, the slowest reads and the longest round trip of all nodes."""
    by_tier: dict[str, list[Measurement]] = {}
    for m in (m for n in nodes for m in n.measures):
        by_tier.setdefault(m.tier, []).append(m)
    return tuple(
        Measurement(
            tier,
            min((m.write_mb_s for m in measured if m.write_mb_s), default=0),
            min((m.read_mb_s for m in measured if m.read_mb_s), default=0),
            max(m.round_trip_ms for m in measured),
            min(measured, key=lambda m: (m.read_mb_s or 2**53, -m.round_trip_ms, m.node)).node,
        )
        for tier, measured in sorted(by_tier.items())[:MAX_FINDINGS]
    )


def to_text(value: Any) -> str:
    """`value` if it is a string, truncated; else empty."""
    return value[:_MAX_TEXT] if isinstance(value, str) else ""


def _measurements(entries: list[dict[str, Any]], node: str) -> tuple[Measurement, ...]:
    """One for each tier, from the values of the findings about it."""
    values: dict[str, dict[str, Any]] = {}
    for f in entries:
        tier = to_text(f.get("tier"))[:_MAX_TIER]
        if tier and isinstance(f.get("values"), dict):
            values.setdefault(tier, {}).update(f["values"])
    measurements = (
        Measurement(
            tier,
            _round_up(v.get("write_mb_s")),
            _round_up(v.get("read_mb_s")),
            _round_up(v.get("round_trip_ms")),
            node,
        )
        for tier, v in sorted(values.items())[:MAX_FINDINGS]
    )
    return tuple(m for m in measurements if m.write_mb_s or m.read_mb_s or m.round_trip_ms)


def _round_up(value: Any) -> int:
    """The next integer, so that a fraction does not become 0, which means not measured."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 2**53:
        return 0
    return math.ceil(value)
