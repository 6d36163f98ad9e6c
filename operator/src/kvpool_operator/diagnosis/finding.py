"""A finding: what is wrong with which object, why, what it costs, and what to do. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvpool_operator.api.findings.codes import Code
    from kvpool_operator.api.findings.row import Severity

__all__ = ["PoolFinding", "make", "ranked"]

MAX_SUMMARY: Final = 500
MAX_FIX: Final = 300


@dataclass(frozen=True)
class PoolFinding:
    """One result of an analyzer."""

    code: Code
    severity: Severity
    subject: str
    """Kind and name of the object, such as `Pod team-a/vllm-0`."""
    summary: str
    """What was observed: one line, no figures that change all the time."""
    cause: str
    effect: str
    fix: str

    @property
    def key(self) -> tuple[str, str]:
        """Identity: code and subject."""
        return self.code.value, self.subject

    def dump(self) -> dict[str, str]:
        """Return JSON values."""
        return {
            "code": self.code.value,
            "severity": self.severity.value,
            "subject": self.subject,
            "summary": self.summary,
            "cause": self.cause,
            "effect": self.effect,
            "fix": self.fix,
            "docs": self.code.anchor,
        }


def make(code: Code, subject: str, summary: str, *, fix: str = "", severity: Severity | None = None) -> PoolFinding:
    """Return a finding with the words of the table; `fix` and `severity` replace those of the table."""
    line = " ".join(summary.split())[:MAX_SUMMARY]
    remedy = " ".join(fix.split())[:MAX_FIX] or code.fix
    return PoolFinding(code, severity or code.severity, subject[:253], line, code.cause, code.effect, remedy)


def ranked(findings: Iterable[PoolFinding]) -> tuple[PoolFinding, ...]:
    """The most severe first, then by code and subject; one finding for each code and subject."""
    unique: dict[tuple[str, str], PoolFinding] = {}
    for finding in sorted(findings, key=lambda f: (f.severity.rank, f.code.value, f.subject)):
        unique.setdefault(finding.key, finding)
    return tuple(unique.values())
