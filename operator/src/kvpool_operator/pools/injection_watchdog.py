"""Decides which Events to emit about engine pods that are not injected or outdated, and which pod to evict. Pure.

The owner of an evicted pod recreates it; a PodDisruptionBudget may block the eviction. One pod of a pool is evicted at
a time, and none while another pod of the same owner is unavailable (a tenth of the pods for a large owner). If the
new pods of an owner are no better, the owner is left alone for an hour, then for two, up to a day, so that a webhook
that stays unavailable does not cause endless evictions.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from kvpool_operator.api.findings.codes import Code
from kvpool_operator.api.reasons import EventReason
from kvpool_operator.diagnosis.injection import code_of_skip

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvpool_operator.observe.engine_pods import EnginePod

__all__ = ["EvictionHistory", "PodEvent", "next_candidate", "pod_event"]

RETRY_PAUSE_S: Final = 3600.0
MAX_RETRY_PAUSE_S: Final = 24 * 3600.0
NEVER_EVICTED_OWNERS: Final = frozenset({"Job", "Node"})
"""Owners whose pods are never evicted: a Job loses its work, a static pod of a node cannot be evicted."""
MAX_DISRUPTED_FRACTION: Final = 10
"""At most one in this many pods of an owner may be unavailable, but at least one pod."""


@dataclass(frozen=True)
class PodEvent:
    """An Event about a pod."""

    reason: EventReason
    message: str
    warning: bool
    about_owner: bool = False
    """It is emitted about the pod's controller too, where people look first."""


@dataclass(frozen=True)
class _EvictionAttempt:
    at: float
    target: str
    seen: frozenset[str]
    """Uids of the owner's pods at the time of the eviction."""
    failures: int = 0
    """Number of earlier evictions whose new pod was no better."""

    def pause_s(self) -> float:
        return min(MAX_RETRY_PAUSE_S, RETRY_PAUSE_S * 2.0 ** min(self.failures, 10))


@dataclass
class EvictionHistory:
    """Evictions of this process for one pool. It starts with a pause, so that frequent restarts cause few evictions."""

    last: float
    attempts: dict[str, _EvictionAttempt] = field(default_factory=dict)
    blocked_until: dict[str, float] = field(default_factory=dict)
    """Time until which no eviction is tried, by uid of an owner whose PodDisruptionBudget blocked one."""
    problem: str = ""
    """Why the last candidate was not evicted."""

    def record_eviction(self, pod: EnginePod, pods: Iterable[EnginePod], target: str, now: float) -> None:
        """`pod` was evicted. `target`: what its successor should be injected with."""
        if pod.owner is not None:
            seen = frozenset(p.uid for p in pods if p.owner is not None and p.owner.uid == pod.owner.uid)
            old = self.attempts.get(pod.owner.uid)
            is_repeated = old is not None and old.target == target and pod.uid not in old.seen
            self.attempts[pod.owner.uid] = _EvictionAttempt(
                now, target, seen, old.failures + 1 if old and is_repeated else 0
            )
        self.last = now

    def record_blocked(self, pod: EnginePod, until: float) -> None:
        """A PodDisruptionBudget blocked the eviction of `pod`."""
        if pod.owner is not None:
            self.blocked_until[pod.owner.uid] = until

    def forget(self, pods: Iterable[EnginePod], now: float) -> None:
        """Drop owners without pods, and pauses that are over."""
        owners = {p.owner.uid for p in pods if p.owner is not None}
        self.attempts = {uid: t for uid, t in self.attempts.items() if uid in owners}
        self.blocked_until = {uid: until for uid, until in self.blocked_until.items() if uid in owners and now < until}


def pod_event(pod: EnginePod, pool: str, silent: str = "", *, refused: bool = False) -> PodEvent | None:
    """The Event to emit about a pod; None if it is fine. `pool`: namespace/name. `silent`: why it has no connection.

    `refused`: the plug-in of its engine reported that. The message ends with the code of the finding.
    """
    event = _pod_event(pod, pool, silent)
    if event is None:
        return None
    codes = [code for code in Code if event.reason in code.events]
    code = codes[0] if refused or len(codes) == 1 else codes[-1]
    if event.reason is EventReason.INJECTION_SKIPPED:
        code = code_of_skip(pod.skip)
    return replace(event, message=f"{event.message} [{code.value}]")


def _pod_event(pod: EnginePod, pool: str, silent: str) -> PodEvent | None:
    if pod.leaving:
        return None
    if pod.state == "skipped":
        message = f"the pod runs without the pool {pool}: {pod.skip}"
        return PodEvent(EventReason.INJECTION_SKIPPED, message, warning=True, about_owner=True)
    if pod.waits_for_image:
        message = (
            f"the engine does not start: the node cannot pull the image of the client, {pod.waits_for_image}; make it "
            f"available to namespace {pod.namespace}, for example by imagePullSecrets, or recreate the pod: for an "
            "hour new pods of the namespace start without the pool; the label kvpool.dev/inject: disabled keeps it so"
        )
        return PodEvent(EventReason.CLIENT_IMAGE_UNAVAILABLE, message, warning=True, about_owner=True)
    if silent:
        message = f"the pod was injected for the pool {pool} and runs without it: {silent}"
        return PodEvent(EventReason.ENGINE_WITHOUT_POOL, message, warning=True, about_owner=True)
    if pod.state == "not_injected":
        cause = "because the injection webhook was unavailable"
        if pod.selected_by:
            selecting = "the pool" if pod.selected_by == "pool" else "its namespace"
            cause = f"before {selecting} selected it, or while the injection webhook was unavailable"
        message = (
            f"the pod started without KVPool {cause}; it works without the pool; recreate it to use the pool {pool}"
        )
        return PodEvent(EventReason.NOT_INJECTED, message, warning=True)
    if pod.outdated:
        message = f"the pod has an older {pod.outdated} of the pool {pool}; it works; recreate it to update it"
        return PodEvent(EventReason.INJECTION_OUTDATED, message, warning=False)
    if pod.warnings:
        message = f"the pod was injected for the pool {pool}: {pod.warnings}"
        return PodEvent(EventReason.INJECTION_LIMITED, message, warning=True)
    return None


def next_candidate(
    pods: Iterable[EnginePod], history: EvictionHistory, target: str, now: float, every_s: float
) -> EnginePod | None:
    """The pod to evict now: pods that are not injected before pods that are outdated."""
    if now - history.last < every_s:
        return None
    owned: defaultdict[str, list[EnginePod]] = defaultdict(list)
    for pod in pods:
        if pod.owner is not None and pod.owner.kind not in NEVER_EVICTED_OWNERS:
            owned[pod.owner.uid].append(pod)
    candidates = [
        pod
        for uid, pods_of_owner in owned.items()
        if uid not in history.blocked_until
        for pod in _candidates_of_owner(pods_of_owner, history.attempts.get(uid), target, now)
    ]
    return min(candidates, key=lambda p: (p.state != "not_injected", p.namespace, p.name), default=None)


def _candidates_of_owner(
    pods: list[EnginePod], attempt: _EvictionAttempt | None, target: str, now: float
) -> list[EnginePod]:
    affected = [p for p in pods if not p.leaving and (p.state == "not_injected" or p.outdated)]
    is_paused = attempt is not None and attempt.target == target and now - attempt.at < attempt.pause_s()
    if attempt is not None and is_paused and any(p.uid not in attempt.seen for p in affected):
        return []  # the successor of the last evicted pod is no better
    max_unavailable = max(1, sum(not p.leaving for p in pods) // MAX_DISRUPTED_FRACTION)
    unavailable = {p.uid for p in pods if p.leaving or not p.ready}
    return [p for p in affected if len(unavailable - {p.uid}) < max_unavailable]
