"""Selects the active sidecar of each node while two pods overlap during an update. Pure.

Kubernetes starts the new pod alongside the old one. The new one stands by, then takes over the drives; the old one has
then handed over and waits for its deletion (docs/how-to/upgrade.md). Every list of sidecars is made here.
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

_GRACE_S: Final = 5.0
"""The DaemonSet controller reacts about a second after a pod was ready for minReadySeconds."""
_RESYNC_INTERVAL_S: Final = 30.0

_INACTIVE: Final[dict[Phase, str]] = {
    "StandingBy": "the sidecar stands by: another process owns the drives",
    "HandedOver": "the sidecar handed over its drives, and no process serves them",
}


def active_sidecars(pods: Iterable[Manifest], reports: Mapping[str, SidecarStatus]) -> tuple[Sidecar, ...]:
    """The sidecar of each node, sorted by node. `reports` by address; pods that are being deleted do not count."""
    groups = _by_node(pods)
    found = [_sidecar(group, reports) for group in groups if any(podview.is_staying(p) for p in group)]
    return tuple(sorted(found, key=lambda s: s.node))


def stalled_rollover(pods: Iterable[Manifest], min_ready_s: float, now: datetime) -> str:
    """A token that changes every `_RESYNC_INTERVAL_S` while the DaemonSet controller should delete an old pod.

    It holds the names of pods that have been ready for `min_ready_s` while an older one is still on their node, and
    a counter. Empty if there is none.
    """
    late: list[tuple[str, float]] = []
    for group in _by_node(p for p in pods if podview.is_staying(p)):
        since = podview.ready_since(group[-1])
        if len(group) > 1 and since is not None:
            seconds = (now - since).total_seconds() - min_ready_s - _GRACE_S
            if seconds >= 0:
                late.append((group[-1]["metadata"]["name"], seconds))
    if not late:
        return ""
    return ",".join([*sorted(name for name, _ in late)[:8], str(int(max(s for _, s in late) / _RESYNC_INTERVAL_S) + 1)])


def in_handover(pods: Iterable[Manifest], reports: Mapping[str, SidecarStatus]) -> list[str]:
    """Addresses on nodes with two pods of which none reports that it serves: normally for about a second.

    A pod does not answer while it releases or takes over the drives. If no pod is Ready either, there is no handover.
    """
    handover: list[str] = []
    for group in _by_node(pods):
        living = [p for p in group if podview.is_staying(p)]
        addresses = [a for p in living if (a := podview.address(p))]
        changing = any(podview.is_ready(p) for p in living) and not any(_serves(p, reports) for p in living)
        if len(addresses) > 1 and changing:
            handover += addresses
    return handover


def _sidecar(group: Sequence[Manifest], reports: Mapping[str, SidecarStatus]) -> Sidecar:
    """`group`: all pods of one node, the oldest first."""
    living = [p for p in group if podview.is_staying(p)]
    pod = max(living, key=lambda p: (_serves(p, reports), _may_serve(p, reports), living.index(p)))
    address = podview.address(pod)
    report = reports.get(address)
    inactive = _INACTIVE.get(report.phase, "") if report is not None else ""
    is_ready = podview.is_ready(pod)
    if len(group) > 1 and report is not None:  # the readiness probe lags seconds behind the report
        is_ready |= report.ready
    is_ready = is_ready and not inactive
    newer = living[living.index(pod) + 1 :]
    return Sidecar(
        node=podview.node(pod),
        ready=is_ready,
        problem=inactive or _problem(pod),
        report=None if inactive else report,
        address="" if inactive else address,
        ready_delta=is_ready - podview.is_ready(group[0]),
        successor_problem=next((problem for p in newer if (problem := _problem(p))), ""),
    )


def _by_node(pods: Iterable[Manifest]) -> list[list[Manifest]]:
    """Pods by node, in the order of the DaemonSet controller, which counts the first only.

    A pod without a node is a group of its own.
    """
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
    """Ready and did not answer this poll: preferred to one that reports that it does not serve."""
    return podview.is_ready(pod) and podview.address(pod) not in reports


def _problem(pod: Manifest) -> str:
    found = podview.problem(pod)
    return found.message if found is not None else ""
