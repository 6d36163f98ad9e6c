"""Runs the preflight checks, serves the report at /status, and repeats the checks until they pass.

The pod is Ready once there is a report, whatever its result; the operator reads the report and deletes the pod.
"""

from __future__ import annotations

import logging
import signal
import threading
from typing import TYPE_CHECKING, Any

from kvpool_sidecar.observability.http import HealthServer
from kvpool_sidecar.preflight.run import run

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpool_sidecar.preflight.finding import Report
    from kvpool_sidecar.preflight.run import PreflightSettings

__all__ = ["PreflightReply", "merge_measurements", "serve_preflight"]

log = logging.getLogger(__name__)

REPEAT_INTERVAL_S = 5.0
_MEASURED = ("Speed",)


class PreflightReply:
    """Content of /status; thread-safe. Ready once the first report is there."""

    def __init__(self) -> None:
        self._report: Report | None = None

    def publish(self, report: Report) -> None:
        """Replace the report."""
        self._report = report

    def ready(self) -> bool:
        return self._report is not None

    def __call__(self) -> dict[str, Any]:
        return {"preflight": self._report.dump() if self._report is not None else None}

    def text(self) -> bytes:
        """Return no metrics: the pod lives for seconds."""
        return b""


def merge_measurements(first: Report, newer: Report) -> Report:
    """Return the newer report with the measurements of the first one, which are not repeated."""
    measured = tuple(f for f in first.findings if f.check in _MEASURED)
    return newer._replace(findings=(*newer.findings, *measured))


def serve_preflight(
    settings: PreflightSettings,
    host: str,
    port: int,
    *,
    interval_s: float = REPEAT_INTERVAL_S,
    stop: threading.Event | None = None,
    run_checks: Callable[..., Report] = run,
) -> int:
    """Serve until SIGTERM, SIGINT or `stop`. OSError if the address is in use."""
    stopping = stop or threading.Event()
    if stop is None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stopping.set())
    answer = PreflightReply()
    server = HealthServer(host, port, answer, answer)
    server.start()
    try:
        first = run_checks(settings)
        _log(first)
        answer.publish(first)
        newest = first
        while not stopping.wait(interval_s):
            if newest.passed:
                continue
            newest = merge_measurements(first, run_checks(settings, measure=False))
            answer.publish(newest)
            if newest.passed:
                log.info("all preflight checks pass now")
    finally:
        server.stop()
    return 0


def _log(report: Report) -> None:
    for finding in report.findings:
        level = logging.INFO if finding.level.value == "Ok" else logging.WARNING
        advice = f"; {finding.advice}" if finding.advice else ""
        log.log(level, "%s %s %s: %s%s", finding.level.value, finding.check, finding.tier, finding.message, advice)
