"""Operation `preflight`: run the preflight checks of a rollout while the node serves (kvpool_sidecar.preflight).

Parameters: `measure`: also write and read up to 256 MiB on each drive. Counts: checks, and those of them that warned or
failed. A failed check fails the operation, with the fix in its message.
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

_MAX_REPORTED = 3


class Preflight:
    """Operation `preflight`."""

    def __init__(self, settings: PreflightSettings, run_checks: Callable[..., Report] = run) -> None:
        self._settings = settings
        self._run_checks = run_checks

    def __call__(self, params: Mapping[str, object], context: Context) -> Mapping[str, int]:
        measure = params.get("measure")
        if params.keys() != {"measure"} or not isinstance(measure, bool):
            raise ProtocolError("preflight: measure (true or false) is required, and nothing else is allowed")
        for label in ("checks", "failed", "warned"):
            context.count(label, 0)
        report = self._run_checks(self._settings, measure=measure)
        context.check()
        context.count("checks", len(report.findings))
        context.count("warned", sum(f.level is Level.WARN for f in report.findings))
        failures = [f for f in report.findings if f.level is Level.FAIL]
        context.count("failed", len(failures))
        if failures:
            problems = [
                f"{f.check} {f.tier}".rstrip() + f": {f.message} ({f.advice})" for f in failures[:_MAX_REPORTED]
            ]
            more = f"; and {len(failures) - _MAX_REPORTED} more" if len(failures) > _MAX_REPORTED else ""
            raise RetryableError("; ".join(problems) + more)
        return {}
