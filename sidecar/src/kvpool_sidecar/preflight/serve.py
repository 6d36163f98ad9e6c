"""Looks at the node, tells over HTTP what was found (/status), and looks again while something is wrong.

The pod is Ready once there is an answer, good or bad; the operator reads it there, and ends the pod.
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

__all__ = ["PreflightReply", "again", "serve_preflight"]

log = logging.getLogger(__name__)

AGAIN_S = 5.0
_MEASURED = ("Speed",)


class PreflightReply:
    """What is told at /status; thread-safe. Not ready before the first look has ended."""

    def __init__(self) -> None:
        self._report: Report | None = None

    def tell(self, report: Report) -> None:
        """The newest look."""
        self._report = report

    def ready(self) -> bool:
        return self._report is not None

    def __call__(self) -> dict[str, Any]:
        return {"preflight": self._report.dump() if self._report is not None else None}

    def text(self) -> bytes:
        """There are no metrics of a pod that lives for seconds."""
        return b""


def again(first: Report, newer: Report) -> Report:
    """The newer look with what only the first one measured."""
    kept = tuple(f for f in first.findings if f.check in _MEASURED)
    return newer._replace(findings=(*newer.findings, *kept))


def serve_preflight(
    settings: PreflightSettings,
    host: str,
    port: int,
    *,
    again_s: float = AGAIN_S,
    stop: threading.Event | None = None,
    look: Callable[..., Report] = run,
) -> int:
    """Until SIGTERM, SIGINT or `stop`. OSError if the address is taken."""
    stopping = stop or threading.Event()
    if stop is None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stopping.set())
    answer = PreflightReply()
    server = HealthServer(host, port, answer, answer)
    server.start()
    try:
        first = look(settings)
        _log(first)
        answer.tell(first)
        newest = first
        while not stopping.wait(again_s):
            if newest.passed:
                continue
            newest = again(first, look(settings, measure=False))
            answer.tell(newest)
            if newest.passed:
                log.info("passed now")
    finally:
        server.stop()
    return 0


def _log(report: Report) -> None:
    for found in report.findings:
        level = logging.INFO if found.level.value == "Ok" else logging.WARNING
        advice = f"; {found.advice}" if found.advice else ""
        log.log(level, "%s %s %s: %s%s", found.level.value, found.check, found.tier, found.message, advice)
