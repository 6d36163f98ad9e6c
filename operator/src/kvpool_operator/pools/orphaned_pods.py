"""Reports pods that opted in to a pool that does not exist: no pool counts them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from kvpool_operator.api.findings.codes import Code
from kvpool_operator.api.reasons import EventReason
from kvpool_operator.observe.engine_pods import find_orphans
from kvpool_operator.pools.pod_events import emit_owner_event, emit_pod_event

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from kvpool_operator.k8s.client import ApiClient, NamespacedName
    from kvpool_operator.k8s.reflector import Lister
    from kvpool_operator.runtime.metrics import OperatorMetrics

__all__ = ["OrphanedPods"]

INTERVAL_S: Final = 30.0
MAX_EVENTS_PER_ROUND: Final = 10


class OrphanedPods:
    """Counts orphaned pods and emits an Event about each. A pod counts once it was seen twice, `INTERVAL_S` apart."""

    def __init__(
        self,
        cluster: ApiClient,
        pods: Lister,
        pools: Callable[[], Collection[NamespacedName] | None],
        metrics: OperatorMetrics,
        watched: Collection[str] = (),
    ) -> None:
        """`pools` returns the pools of the namespaces `watched` (empty: all); None while they are not known."""
        self._watched = watched
        self._cluster = cluster
        self._pods = pods
        self._pools = pools
        self._metrics = metrics
        self._seen: set[str] = set()
        self._emitted: set[str] = set()

    async def run(self) -> None:
        """Repeat until cancelled."""
        while True:
            await self.report()
            await asyncio.sleep(INTERVAL_S)

    async def report(self) -> None:
        """Count once, and emit some of the Events that are missing."""
        pools = self._pools()
        if pools is None:
            return
        found = find_orphans(self._pods.list(), pools, self._watched)
        confirmed = [pod for pod, _ in found if pod.uid in self._seen]
        self._seen = {pod.uid for pod, _ in found}
        self._emitted &= self._seen | {pod.owner.uid for pod, _ in found if pod.owner is not None}
        self._metrics.orphaned_pods.set(len(confirmed))
        wanted = {pod.uid: name for pod, name in found}
        for pod in [pod for pod in confirmed if pod.uid not in self._emitted][:MAX_EVENTS_PER_ROUND]:
            code = Code.POOL_NOT_FOUND.value
            message = f"the pod opted in to {wanted[pod.uid]}, which does not exist; it runs without a pool [{code}]"
            self._emitted.add(pod.uid)
            await emit_pod_event(pod, EventReason.POOL_NOT_FOUND, message, self._cluster, warning=True)
            if pod.owner is not None and pod.owner.uid not in self._emitted:
                self._emitted.add(pod.owner.uid)
                await emit_owner_event(pod, pod.owner, EventReason.POOL_NOT_FOUND, message, self._cluster)
