"""Preflight answers of nodes, runs, and what status.preflight holds after them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from kvpool_operator.preflight.results import Finding, NodePreflight, PreflightRun

NOW = datetime(2026, 11, 21, 10, tzinfo=UTC)


def answer(passed: bool = True, **finding: Any) -> dict[str, Any]:
    listed = [{"check": "Speed", "level": "Ok", "message": "fast"}]
    if finding:
        listed.insert(
            0, {"check": "Directory", "level": "Fail", "message": "it is full", "advice": "mend it", **finding}
        )
    return {"preflight": {"version": 1, "passed": passed, "findings": listed}}


BAD = answer(passed=False, tier="nvme")


def looks(*passed: bool | None, desired: int | None = -1) -> PreflightRun:
    nodes = tuple(
        NodePreflight(
            f"node-{i}", p, (Finding("Directory", "Fail", "it is full", node=f"node-{i}"),) if p is False else ()
        )
        for i, p in enumerate(passed)
    )
    return PreflightRun(len(passed) if desired == -1 else desired, nodes, "s")


def reported(gate: Any) -> dict[str, Any]:
    """What status.preflight holds after a pass."""
    status = gate.to_status()
    return status.model_dump(by_alias=True) if status is not None else {}
