"""Emits Events about engine pods that are not injected or outdated, and evicts them if the pool allows it."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvpool_operator.api.duration import to_ms
from kvpool_operator.api.reasons import EventReason
from kvpool_operator.errors import ConflictError, EvictionBlockedError, NotLeaderError, OperatorError, RejectedError
from kvpool_operator.k8s.client import ObjectRef
from kvpool_operator.pools.apply import evict_pod
from kvpool_operator.pools.injection_watchdog import EvictionHistory, next_candidate, pod_event
from kvpool_operator.pools.pod_events import emit_owner_event, emit_pod_event

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvpool_operator.api.v1alpha1 import KVCachePool
    from kvpool_operator.k8s.client import ApiClient
    from kvpool_operator.observe.engine_connections import SilentPod
    from kvpool_operator.observe.engine_pods import EnginePod
    from kvpool_operator.observe.snapshot import Snapshot

__all__ = ["EvictionRound", "PodEvictor"]

log = logging.getLogger(__name__)

MAX_EVENTS_PER_RECONCILE: Final = 10
"""Limit of Events per reconcile, for webhook outages that affect thousands of pods."""


@dataclass(frozen=True)
class EvictionRound:
    """Result of one reconcile. `outcomes` are label values of a metric, `problem` is a message for the status."""

    outcomes: tuple[str, ...] = ()
    problem: str = ""


class PodEvictor:
    """Evicts pods of all pools. A new process has no history and waits for the pause before the first eviction."""

    def __init__(self, cluster: ApiClient, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._cluster = cluster
        self._clock = clock
        self._histories: dict[str, EvictionHistory] = {}
        self._emitted: dict[str, set[tuple[str, EventReason]]] = {}

    async def reconcile(self, pool: KVCachePool, snapshot: Snapshot, target: str) -> EvictionRound:
        """Emit one Event per pod; evict one pod if the pool allows it. `target`: what new pods are injected with."""
        if pool.spec.mode == "DryRun":
            return EvictionRound()  # it injects nothing, so nothing is missing
        silent = {one.pod.uid: one for one in snapshot.connections.silent}
        await self._emit_events(pool.key, snapshot.engines.pods, silent)
        history = self._histories.setdefault(pool.key, EvictionHistory(last=self._clock()))
        history.forget(snapshot.engines.pods, self._clock())
        injection = pool.spec.injection
        is_allowed = injection.enabled and injection.watchdog == "Restart" and pool.spec.mode == "Enforce"
        is_needed = snapshot.engines.not_injected or snapshot.engines.outdated
        if not is_allowed or snapshot.webhook.problem or not is_needed:
            history.problem = ""
            return EvictionRound()  # no pod needs it, or a new pod would be no better
        every_s = to_ms(injection.restart_every) / 1000
        pod = next_candidate(snapshot.engines.pods, history, target, self._clock(), every_s)
        if pod is None:
            return EvictionRound(problem=history.problem)
        outcome, history.problem = await self._evict(pod, pool, snapshot, history, target, every_s)
        return EvictionRound((outcome,), history.problem)

    def forget(self, key: str) -> None:
        """The pool `namespace/name` no longer exists."""
        self._histories.pop(key, None)
        self._emitted.pop(key, None)

    async def _evict(
        self,
        pod: EnginePod,
        pool: KVCachePool,
        snapshot: Snapshot,
        history: EvictionHistory,
        target: str,
        every_s: float,
    ) -> tuple[str, str]:
        """The outcome, and the problem if the pod was not evicted."""
        now = self._clock()
        try:
            await evict_pod(ObjectRef("Pod", pod.namespace, pod.name), pod.uid, self._cluster)
        except NotLeaderError:
            raise
        except EvictionBlockedError:
            history.record_blocked(pod, now + every_s)
            return "held", f"a PodDisruptionBudget keeps {pod.full_name} from being evicted now"
        except ConflictError:
            return "gone", ""
        except RejectedError as e:
            history.last = now
            hint = "; allow it by the chart's value operator.restartPods" if e.status == 403 else f": {e}"
            return "refused", f"the operator may not evict {pod.full_name}{hint}"
        except OperatorError as e:
            history.last = now
            log.warning("pool=%s: %s was not evicted: %s", pool.key, pod.full_name, e)
            return "failed", ""
        history.record_eviction(pod, snapshot.engines.pods, target, now)
        log.info("pool=%s: evicted %s, so that its owner recreates it with the pool", pool.key, pod.full_name)
        why = "ran without" if pod.state == "not_injected" else f"had an older {pod.outdated} of"
        message = f"evicted because it {why} the pool {pool.key}; its owner recreates it"
        await self._emit(pod, EventReason.EVICTED_FOR_INJECTION, message, warning=False)
        return "evicted", ""

    async def _emit_events(self, key: str, pods: tuple[EnginePod, ...], silent: Mapping[str, SilentPod]) -> None:
        uids = {p.uid for p in pods} | {p.owner.uid for p in pods if p.owner is not None}
        emitted = self._emitted[key] = {e for e in self._emitted.get(key, set()) if e[0] in uids}
        left = MAX_EVENTS_PER_RECONCILE
        for pod in pods:
            one = silent.get(pod.uid)
            event = pod_event(pod, key, one.why if one else "", refused=one is not None and one.refused)
            if event is None or (pod.uid, event.reason) in emitted:
                continue
            if not left:
                return
            left -= 1
            emitted.add((pod.uid, event.reason))
            await self._emit(pod, event.reason, event.message, warning=event.warning)
            if event.about_owner and pod.owner is not None and (pod.owner.uid, event.reason) not in emitted:
                emitted.add((pod.owner.uid, event.reason))
                await emit_owner_event(pod, pod.owner, event.reason, event.message, self._cluster)

    async def _emit(self, pod: EnginePod, reason: EventReason, message: str, *, warning: bool) -> None:
        await emit_pod_event(pod, reason, message, self._cluster, warning=warning)
