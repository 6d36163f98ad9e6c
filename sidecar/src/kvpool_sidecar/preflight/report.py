"""Formats a preflight report as text or JSON."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvpool_sidecar.preflight.finding import Report

__all__ = ["format_report"]


def format_report(report: Report, *, as_json: bool) -> str:
    """Return JSON on one line, or a line for each finding and its fix; the worst findings first."""
    content = report.dump()
    if as_json:
        return json.dumps(content, sort_keys=True)
    lines = []
    for finding in content["findings"]:
        name = f"{finding['check']} {finding['tier']}".rstrip()
        lines.append(f"{finding['level'].lower():5} {name}: {finding['message']}")
        if finding["advice"]:
            lines.append(f"      {finding['advice']}")
    verdict = "passed" if report.passed else "FAILED"
    return "\n".join([*lines, f"{report.node}: {verdict} in {report.seconds:.1f} s"])
