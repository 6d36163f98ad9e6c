"""A look at a node for people, or as JSON."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvpool_sidecar.preflight.finding import Report

__all__ = ["show"]


def show(report: Report, *, as_json: bool) -> str:
    """The worst first. JSON on one line, or a line for each finding and its advice."""
    told = report.dump()
    if as_json:
        return json.dumps(told, sort_keys=True)
    lines = []
    for found in told["findings"]:
        name = f"{found['check']} {found['tier']}".rstrip()
        lines.append(f"{found['level'].lower():5} {name}: {found['message']}")
        if found["advice"]:
            lines.append(f"      {found['advice']}")
    verdict = "passed" if report.passed else "FAILED"
    return "\n".join([*lines, f"{report.node}: {verdict} in {report.seconds:.1f} s"])
