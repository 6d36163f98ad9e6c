"""Engine pods without the pool, or with an older client or configuration: what to say, and which to make again. Pure.

A pod is made again by its owner after an eviction, which a PodDisruptionBudget may refuse. One pod of a pool goes at a
time, none where another of the same owner is away (a tenth of a large owner), and an owner whose new pods are no better
is left alone for an hour, then for two, up to a day: a webhook that never comes must not make pods go round.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvpool_operator.observe.engine_pods import EnginePod

__all__ = ["EvictionHistory", "PodEvent", "next_candidate", "pod_event"]

RETRY_PAUSE_S: Final = 3600.0
MAX_RETRY_PAUSE_S: Final = 24 * 3600.0
NEVER_EVICTED_OWNERS: Final = frozenset({"Job", "Node"})
"""Owners whose pods are not made again for this: a Job loses its work, a node's static pod cannot be evicted."""
MAX_DISRUPTED_FRACTION: Final = 10
"""At most one pod in so many of an owner is away because of us, and never less than one."""


@dataclass(frozen=True)
class PodEvent:
    """An Event about a pod."""

    reason: str
    message: str
    warning: bool


@dataclass(frozen=True)
class _EvictionAttempt:
    at: float
    target: str
    seen: frozenset[str]
    """Uids of the owner's pods when one of them was evicted."""
    in_vain: int = 0
    """How many before it were followed by a pod that was no better."""

    def pause_s(self) -> float:
        return min(MAX_RETRY_PAUSE_S, RETRY_PAUSE_S * 2.0 ** min(self.in_vain, 10))


@dataclass
class EvictionHistory:
    """What this process did for one pool. It begins with a pause: a process that restarts often evicts little."""

    last: float
    tries: dict[str, _EvictionAttempt] = field(default_factory=dict)
    rests: dict[str, float] = field(default_factory=dict)
    """By uid of an owner: until when a budget is not asked again."""
    problem: str = ""
    """Why the last one that was to go is still there."""

    def evicted(self, pod: EnginePod, pods: Iterable[EnginePod], target: str, now: float) -> None:
        """`pod` goes. `target`: what its successor should carry."""
        if pod.owner is not None:
            seen = frozenset(p.uid for p in pods if p.owner is not None and p.owner.uid == pod.owner.uid)
            old = self.tries.get(pod.owner.uid)
            again = old is not None and old.target == target and pod.uid not in old.seen
            self.tries[pod.owner.uid] = _EvictionAttempt(now, target, seen, old.in_vain + 1 if old and again else 0)
        self.last = now

    def held(self, pod: EnginePod, until: float) -> None:
        """A budget keeps `pod` where it is."""
        if pod.owner is not None:
            self.rests[pod.owner.uid] = until

    def forget(self, pods: Iterable[EnginePod], now: float) -> None:
        """Owners that are gone, and pauses that are over."""
        there = {p.owner.uid for p in pods if p.owner is not None}
        self.tries = {uid: t for uid, t in self.tries.items() if uid in there}
        self.rests = {uid: until for uid, until in self.rests.items() if uid in there and now < until}


def pod_event(pod: EnginePod, pool: str) -> PodEvent | None:
    """What the owner of a pod should hear, once. `pool`: namespace/name."""
    if pod.leaving:
        return None
    if pod.state == "not_injected":
        told = f"admitted while nobody injected: it runs without the pool {pool} until it is made again"
        return PodEvent("NotInjected", told, warning=True)
    if pod.outdated:
        told = f"it carries an older {pod.outdated} of the pool {pool} than a new pod would, and works with it"
        return PodEvent("InjectionOutdated", told, warning=False)
    return None


def next_candidate(
    pods: Iterable[EnginePod], memory: EvictionHistory, target: str, now: float, every_s: float
) -> EnginePod | None:
    """The pod to evict now; those without the pool before those with an old one."""
    if now - memory.last < every_s:
        return None
    owned: defaultdict[str, list[EnginePod]] = defaultdict(list)
    for pod in pods:
        if pod.owner is not None and pod.owner.kind not in NEVER_EVICTED_OWNERS:
            owned[pod.owner.uid].append(pod)
    fit = [
        pod
        for uid, those in owned.items()
        if uid not in memory.rests
        for pod in _candidates_of_owner(those, memory.tries.get(uid), target, now)
    ]
    return min(fit, key=lambda p: (p.state != "not_injected", p.namespace, p.name), default=None)


def _candidates_of_owner(
    pods: list[EnginePod], tried: _EvictionAttempt | None, target: str, now: float
) -> list[EnginePod]:
    bad = [p for p in pods if not p.leaving and (p.state == "not_injected" or p.outdated)]
    waits = tried is not None and tried.target == target and now - tried.at < tried.pause_s()
    if tried is not None and waits and any(p.uid not in tried.seen for p in bad):
        return []  # the last one's successor is no better
    room = max(1, sum(not p.leaving for p in pods) // MAX_DISRUPTED_FRACTION)
    away = {p.uid for p in pods if p.leaving or not p.ready}
    return [p for p in bad if len(away - {p.uid}) < room]
