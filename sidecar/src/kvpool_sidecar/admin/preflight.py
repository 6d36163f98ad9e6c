"""Preflight: look at this node as before a roll-out, while it serves (kvpool_sidecar.preflight).

parameters: `measure`: write and read up to 256 MiB on each drive, too. counts: checks, and those of them that warned or
failed. What failed is this node's failure, with what to do about it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpool.errors import ProtocolError, RetryableError
from kvpool_sidecar.preflight.finding import Level
from kvpool_sidecar.preflight.run import run

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvpool_sidecar.admin.context import Context
    from kvpool_sidecar.preflight.finding import Report
    from kvpool_sidecar.preflight.run import PreflightSettings

__all__ = ["Preflight"]

_MOST_TOLD = 3


class Preflight:
    """A kind of operation."""

    def __init__(self, settings: PreflightSettings, look: Callable[..., Report] = run) -> None:
        self._settings = settings
        self._look = look

    def __call__(self, params: Mapping[str, object], context: Context) -> Mapping[str, int]:
        measure = params.get("measure")
        if params.keys() != {"measure"} or not isinstance(measure, bool):
            raise ProtocolError("preflight: give measure, true or false, and nothing else")
        for label in ("checks", "failed", "warned"):
            context.count(label, 0)
        report = self._look(self._settings, measure=measure)
        context.check()
        context.count("checks", len(report.findings))
        context.count("warned", sum(f.level is Level.WARN for f in report.findings))
        failures = [f for f in report.findings if f.level is Level.FAIL]
        context.count("failed", len(failures))
        if failures:
            told = [f"{f.check} {f.tier}".rstrip() + f": {f.message} ({f.advice})" for f in failures[:_MOST_TOLD]]
            more = f"; and {len(failures) - _MOST_TOLD} more" if len(failures) > _MOST_TOLD else ""
            raise RetryableError("; ".join(told) + more)
        return {}
