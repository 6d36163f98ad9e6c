"""Findings, checks and figures as text. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from kvpool_cli.errors import FINDINGS, OK

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvpool_cli.output import Style
    from kvpool_operator.diagnosis import PoolFinding

_COLORS = {"Error": "red", "Warning": "yellow", "Info": "cyan"}
_STATES = {"ok": "green", "FAIL": "red", "warn": "yellow", "skip": "dim"}


@dataclass(frozen=True)
class Check:
    """One step of a diagnosis."""

    state: Literal["ok", "FAIL", "warn", "skip"]
    text: str
    source: str = ""
    """Where it was read."""

    def dump(self) -> dict[str, str]:
        """Return JSON values."""
        return {"state": self.state, "text": self.text, "source": self.source}


def check_lines(checks: Iterable[Check], style: Style) -> list[str]:
    """One line for each check."""
    return [
        f" {style.paint(c.state.ljust(4), _STATES[c.state])}  {c.text}"
        + (style.paint(f"  [{c.source}]", "dim") if c.source else "")
        for c in checks
    ]


def finding_lines(findings: Iterable[PoolFinding], style: Style, *, with_details: bool = False) -> list[str]:
    """`Level [CODE] (subject) summary` and the fix; with details also cause, effect and page."""
    lines = []
    for f in findings:
        level = style.paint(f.severity.value, _COLORS[f.severity.value], "bold")
        lines.append(f"{level} [{f.code.value}] ({f.subject}) {f.summary}")
        if with_details:
            lines += [f"    cause:  {f.cause}", f"    effect: {f.effect}"]
        lines.append(f"    fix:    {f.fix}")
        if with_details:
            lines.append(style.paint(f"    docs:   {f.code.anchor}", "dim"))
    return lines


def summary_line(findings: Sequence[PoolFinding]) -> str:
    """Count of findings by severity."""
    counts = {level: sum(f.severity.value == level for f in findings) for level in _COLORS}
    words = [f"{n} {level.lower()}{'s' if n != 1 and level != 'Info' else ''}" for level, n in counts.items() if n]
    return ", ".join(words) if words else "no findings"


def exit_code(findings: Iterable[PoolFinding]) -> int:
    """1 if there is an error or a warning."""
    return FINDINGS if any(f.severity.value != "Info" for f in findings) else OK


def percent(part: int, whole: int) -> str:
    """`part` of `whole` in percent; a dash without any."""
    return f"{100 * part / whole:.0f} %" if whole else "-"


def quantity(n: float, unit: str = "") -> str:
    """A count with a decimal prefix, such as 4.1M."""
    for prefix in ("", "k", "M", "G", "T"):
        if abs(n) < 1000 or prefix == "T":
            return f"{n:.3g}{prefix}{unit}" if prefix else f"{n:.0f}{unit}"
        n /= 1000
    raise AssertionError("unreachable")


def section(raw: Any, *path: str) -> dict[str, Any]:
    """A nested object of a document; empty if it is absent or no object."""
    for name in path:
        raw = raw.get(name) if isinstance(raw, dict) else None
    return raw if isinstance(raw, dict) else {}


def note_lines(notes: Sequence[str], style: Style) -> list[str]:
    """What could not be read."""
    shown = [style.paint(f"note: {note[:200]}", "dim") for note in notes[:5]]
    return shown + ([style.paint(f"note: {len(notes) - 5} more", "dim")] if len(notes) > 5 else [])
