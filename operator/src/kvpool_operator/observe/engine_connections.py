"""Which injected pods are connected to a sidecar, which stay silent, and why. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from datetime import datetime

    from kvpool_operator.observe.engine_pods import EnginePod
    from kvpool_operator.sidecars.status import SidecarStatus

__all__ = ["SILENT_AFTER_S", "EngineConnections", "SilentPod", "find_connections"]

SILENT_AFTER_S: Final = 120.0
"""Seconds that a pod may be Ready, or a sidecar may run, before a missing connection counts."""


@dataclass(frozen=True)
class SilentPod:
    """A Ready pod whose engine does not use the pool. `why` is a sentence without a period."""

    pod: EnginePod
    why: str
    refused: bool = False
    """Its plug-in reported why."""


@dataclass(frozen=True)
class EngineConnections:
    """Injected pods by connection. The others are not Ready for long enough, or their sidecar did not answer."""

    connected: int = 0
    silent: tuple[SilentPod, ...] = ()


def find_connections(
    pods: Iterable[EnginePod], sidecars: Mapping[str, SidecarStatus | None], now: datetime
) -> EngineConnections:
    """Compare the injected pods with what the sidecars report. `sidecars` by node, None for one that did not answer."""
    reports = [report for report in sidecars.values() if report is not None]
    connected = {uid for report in reports for uid in report.connected_pods}
    problems = {uid: problem for report in reports for uid, problem in report.engine_problems.items()}
    injected = [pod for pod in pods if pod.state == "injected" and pod.has_client and not pod.leaving]
    silent = [
        SilentPod(pod, why, pod.uid in problems)
        for pod in injected
        if pod.uid not in connected and (why := _why_silent(pod, sidecars, problems, now))
    ]
    return EngineConnections(sum(pod.uid in connected for pod in injected), tuple(silent))


def _why_silent(
    pod: EnginePod, sidecars: Mapping[str, SidecarStatus | None], problems: Mapping[str, str], now: datetime
) -> str:
    """Empty while it is too early to know, or if the node's sidecar did not answer."""
    if pod.uid in problems:
        return f"its plug-in reports: {problems[pod.uid]}"
    if pod.ready_since is None or (now - pod.ready_since).total_seconds() < SILENT_AFTER_S:
        return ""
    if pod.node not in sidecars:
        return f"its node {pod.node} has no sidecar of the pool"
    report = sidecars[pod.node]
    if report is None or report.uptime_s < SILENT_AFTER_S:
        return ""
    return "its engine is not connected to the sidecar of its node; see the lines with kvpool in the engine's log"
