"""Which of a node's pods is its sidecar, where two of them stand while one takes over from the other. Pure.

Kubernetes starts the new pod beside the old one; the new one stands by, then takes the drives; the old one has handed
over then and waits until it is deleted (docs/how-to/upgrade.md). Whoever lists sidecars lists them through this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvpool_operator.k8s import pods as podview
from kvpool_operator.observe.snapshot import Sidecar

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from datetime import datetime

    from kvpool_operator.k8s.client import Manifest
    from kvpool_operator.sidecars.status import Phase, SidecarStatus

__all__ = ["active_sidecars", "in_handover", "stalled_rollover"]

_LATE_S: Final = 5.0  # the controller looks a second after a pod has been ready for long enough
_AGAIN_S: Final = 30.0

_IDLE: Final[dict[Phase, str]] = {
    "StandingBy": "its sidecar stands by: another process has the drives",
    "HandedOver": "its sidecar has handed its drives over, and nobody serves them",
}


def active_sidecars(pods: Iterable[Manifest], reports: Mapping[str, SidecarStatus]) -> tuple[Sidecar, ...]:
    """The sidecars, sorted by node. `reports` by address; pods that are being deleted are no sidecars."""
    groups = _by_node(pods)
    found = [_sidecar(group, reports) for group in groups if any(podview.is_staying(p) for p in group)]
    return tuple(sorted(found, key=lambda s: s.node))


def stalled_rollover(pods: Iterable[Manifest], min_ready_s: float, now: datetime) -> str:
    """Names of pods that have been ready for `min_ready_s` and more, while an older one is still on their node.

    With them, how often it was time to tell so: it changes while it is so, every half a minute.
    """
    late: list[tuple[str, float]] = []
    for group in _by_node(p for p in pods if podview.is_staying(p)):
        since = podview.ready_since(group[-1])
        if len(group) > 1 and since is not None:
            seconds = (now - since).total_seconds() - min_ready_s - _LATE_S
            if seconds >= 0:
                late.append((group[-1]["metadata"]["name"], seconds))
    if not late:
        return ""
    return ",".join([*sorted(name for name, _ in late)[:8], str(int(max(s for _, s in late) / _AGAIN_S) + 1)])


def in_handover(pods: Iterable[Manifest], reports: Mapping[str, SidecarStatus]) -> list[str]:
    """Addresses on nodes with two pods of which none says that it serves: for about a second, if all goes well.

    A pod is silent for a moment while it lets go of the drives, or takes them. Where no pod is Ready either, nothing
    changes hands.
    """
    found: list[str] = []
    for group in _by_node(pods):
        living = [p for p in group if podview.is_staying(p)]
        addresses = [a for p in living if (a := podview.address(p))]
        changing = any(podview.is_ready(p) for p in living) and not any(_serves(p, reports) for p in living)
        if len(addresses) > 1 and changing:
            found += addresses
    return found


def _sidecar(group: Sequence[Manifest], reports: Mapping[str, SidecarStatus]) -> Sidecar:
    """`group`: all pods of one node, the oldest first."""
    living = [p for p in group if podview.is_staying(p)]
    pod = max(living, key=lambda p: (_serves(p, reports), _may_serve(p, reports), living.index(p)))
    address = podview.address(pod)
    report = reports.get(address)
    idle = _IDLE.get(report.phase, "") if report is not None else ""
    is_ready = podview.is_ready(pod)
    if len(group) > 1 and report is not None:  # its readiness probe is seconds behind what it says
        is_ready |= report.ready
    is_ready = is_ready and not idle
    newer = living[living.index(pod) + 1 :]
    return Sidecar(
        node=podview.node(pod),
        ready=is_ready,
        problem=idle or _problem(pod),
        report=None if idle else report,
        address="" if idle else address,
        ready_delta=is_ready - podview.is_ready(group[0]),
        successor_problem=next((problem for p in newer if (problem := _problem(p))), ""),
    )


def _by_node(pods: Iterable[Manifest]) -> list[list[Manifest]]:
    """In the order of the DaemonSet controller, which counts the first alone. Pods without a node stand alone."""
    groups: dict[tuple[str, str], list[Manifest]] = {}
    for pod in sorted(pods, key=_age):
        node = podview.node(pod)
        groups.setdefault((node, "" if node else pod["metadata"]["name"]), []).append(pod)
    return list(groups.values())


def _age(pod: Manifest) -> tuple[bool, str, str]:
    meta = pod["metadata"]
    return not (pod.get("spec") or {}).get("nodeName"), str(meta.get("creationTimestamp") or ""), meta["name"]


def _serves(pod: Manifest, reports: Mapping[str, SidecarStatus]) -> bool:
    report = reports.get(podview.address(pod))
    if report is None:
        return False
    return report.phase == "Serving" or (not report.phase and podview.is_ready(pod))


def _may_serve(pod: Manifest, reports: Mapping[str, SidecarStatus]) -> bool:
    """Ready, and silent at this look: rather it than one that says that it does not serve."""
    return podview.is_ready(pod) and podview.address(pod) not in reports


def _problem(pod: Manifest) -> str:
    found = podview.problem(pod)
    return found.message if found is not None else ""
