"""Findings of the preflight checks, as values and as JSON."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Finding", "Level", "Report", "failed", "fine", "warned"]

_MAX_FINDINGS = 64
_MAX_TEXT = 300


class Level(StrEnum):
    """Fail: the pool cannot work on this node with its spec. Warn: it works with a limitation."""

    OK = "Ok"
    WARN = "Warn"
    FAIL = "Fail"


class Finding(NamedTuple):
    """Result of one check. `values` are numbers with the unit in their name (`write_mb_s`, `free_bytes`)."""

    check: str
    level: Level
    message: str
    advice: str = ""
    tier: str = ""
    values: Mapping[str, float] = {}

    def dump(self) -> dict[str, Any]:
        return {
            "check": self.check,
            "level": self.level.value,
            "message": self.message[:_MAX_TEXT],
            "advice": self.advice[:_MAX_TEXT],
            "tier": self.tier,
            "values": {k: round(v, 3) for k, v in self.values.items()},
        }


class Report(NamedTuple):
    """All findings of one node."""

    node: str
    seconds: float
    findings: tuple[Finding, ...]

    @property
    def passed(self) -> bool:
        return all(f.level is not Level.FAIL for f in self.findings)

    def dump(self) -> dict[str, Any]:
        """Return JSON values, with the worst findings first."""
        order = {Level.FAIL: 0, Level.WARN: 1, Level.OK: 2}
        worst = sorted(self.findings, key=lambda f: order[f.level])
        return {
            "version": 1,
            "node": self.node,
            "passed": self.passed,
            "seconds": round(self.seconds, 2),
            "findings": [f.dump() for f in worst[:_MAX_FINDINGS]],
        }


def fine(check: str, message: str, *, tier: str = "", **values: float) -> Finding:
    """Return a finding that meets the requirement."""
    return Finding(check, Level.OK, message, "", tier, values)


def warned(check: str, message: str, advice: str, *, tier: str = "", **values: float) -> Finding:
    """Return a finding that works with a limitation."""
    return Finding(check, Level.WARN, message, advice, tier, values)


def failed(check: str, message: str, advice: str, *, tier: str = "", **values: float) -> Finding:
    """Return a finding that does not meet the requirement."""
    return Finding(check, Level.FAIL, message, advice, tier, values)
