"""The watchdog's hands: Events about engine pods, and evictions where the pool asks for them."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvpool_operator.api.duration import to_ms
from kvpool_operator.errors import ConflictError, EvictionBlockedError, NotLeaderError, OperatorError, RejectedError
from kvpool_operator.k8s.client import ObjectRef
from kvpool_operator.pools.apply import emit_event, evict_pod
from kvpool_operator.pools.injection_watchdog import EvictionHistory, next_candidate, pod_event

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpool_operator.api.v1alpha1 import KVCachePool
    from kvpool_operator.k8s.client import ApiClient
    from kvpool_operator.observe.engine_pods import EnginePod
    from kvpool_operator.observe.snapshot import Snapshot

__all__ = ["EvictionRound", "PodEvictor"]

log = logging.getLogger(__name__)

MAX_EVENTS_PER_RECONCILE: Final = 10
"""Of thousands of pods that were missed at once, so many are told of with each look."""


@dataclass(frozen=True)
class EvictionRound:
    """What came of one look. `outcomes` are words for a metric, `problem` a sentence for the status."""

    outcomes: tuple[str, ...] = ()
    problem: str = ""


class PodEvictor:
    """For all pools. What it remembers is lost with the process, and then a pool's first eviction waits its pause."""

    def __init__(self, cluster: ApiClient, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._cluster = cluster
        self._clock = clock
        self._memory: dict[str, EvictionHistory] = {}
        self._told: dict[str, set[str]] = {}

    async def reconcile(self, pool: KVCachePool, observed: Snapshot, target: str) -> EvictionRound:
        """Tell of each pod once; evict one, if that is wanted and may be done now. `target`: what new pods carry."""
        if pool.spec.mode == "DryRun":
            return EvictionRound()  # it makes nothing, so nothing is missed
        await self._tell(pool.key, observed.engines.pods)
        memory = self._memory.setdefault(pool.key, EvictionHistory(last=self._clock()))
        memory.forget(observed.engines.pods, self._clock())
        injection = pool.spec.injection
        may = injection.enabled and injection.watchdog == "Restart" and pool.spec.mode == "Enforce"
        if not may or observed.webhook.problem or not (observed.engines.not_injected or observed.engines.outdated):
            memory.problem = ""
            return EvictionRound()  # nobody is to go, or a new pod would be no better
        every_s = to_ms(injection.restart_every) / 1000
        pod = next_candidate(observed.engines.pods, memory, target, self._clock(), every_s)
        if pod is None:
            return EvictionRound(problem=memory.problem)
        outcome, memory.problem = await self._evict(pod, pool, observed, memory, target, every_s)
        return EvictionRound((outcome,), memory.problem)

    def forget(self, key: str) -> None:
        """The pool `namespace/name` is gone."""
        self._memory.pop(key, None)
        self._told.pop(key, None)

    async def _evict(
        self,
        pod: EnginePod,
        pool: KVCachePool,
        observed: Snapshot,
        memory: EvictionHistory,
        target: str,
        every_s: float,
    ) -> tuple[str, str]:
        """What came of it, and why it did not happen."""
        now = self._clock()
        try:
            await evict_pod(ObjectRef("Pod", pod.namespace, pod.name), pod.uid, self._cluster)
        except NotLeaderError:
            raise
        except EvictionBlockedError:
            memory.held(pod, now + every_s)
            return "held", f"a PodDisruptionBudget keeps {pod.full_name} from being made again now"
        except ConflictError:
            return "gone", ""
        except RejectedError as e:
            memory.last = now
            hint = "; allow it by the chart's value operator.restartPods" if e.status == 403 else f": {e}"
            return "refused", f"{pod.full_name} may not be evicted{hint}"
        except OperatorError as e:
            memory.last = now
            log.warning("pool=%s: %s was not evicted: %s", pool.key, pod.full_name, e)
            return "failed", ""
        memory.evicted(pod, observed.engines.pods, target, now)
        log.info("pool=%s: evicted %s, which is to be made again with the pool", pool.key, pod.full_name)
        why = "runs without the pool" if pod.state == "not_injected" else f"carries an older {pod.outdated}"
        await self._post(pod, "EvictedForInjection", f"evicted, because it {why} {pool.key}", warning=False)
        return "evicted", ""

    async def _tell(self, key: str, pods: tuple[EnginePod, ...]) -> None:
        there = {p.uid for p in pods}
        told = self._told[key] = {mark for mark in self._told.get(key, set()) if mark.partition(" ")[0] in there}
        left = MAX_EVENTS_PER_RECONCILE
        for pod in pods:
            said = pod_event(pod, key)
            if said is None or (mark := f"{pod.uid} {said.reason}") in told:
                continue
            if not left:
                return
            left -= 1
            told.add(mark)
            await self._post(pod, said.reason, said.message, warning=said.warning)

    async def _post(self, pod: EnginePod, reason: str, message: str, *, warning: bool) -> None:
        about = {"apiVersion": "v1", "kind": "Pod", "namespace": pod.namespace, "name": pod.name, "uid": pod.uid}
        # a name that is the same for another process: it is told of once, as long as Events live
        name = f"{pod.name[:200]}.kvpool-{reason.lower()}.{pod.uid[:8]}"
        await emit_event(about, reason, message, self._cluster, warning=warning, name=name)
