"""Workers around the queue: every key gets its pass, failures their pauses, and no object is ever forgotten."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from typing import TYPE_CHECKING, Final

from kvpool_operator.api.v1alpha1 import KIND
from kvpool_operator.errors import NotLeaderError, OperatorError
from kvpool_operator.k8s.client import NamespacedName
from kvpool_operator.k8s.rate_limiter import IS_FOREGROUND
from kvpool_operator.runtime.watch_staleness import WatchStaleness
from kvpool_operator.runtime.workqueue import Backoff, WorkQueue

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpool_operator.k8s.client import ApiClient, Manifest
    from kvpool_operator.runtime.metrics import OperatorMetrics
    from kvpool_operator.runtime.reconciler import Reconciler, Result

__all__ = ["Controller"]

log = logging.getLogger(__name__)

RECONCILE_TIMEOUT_S: Final = 60.0
"""Longest time of one pass: each of its calls has a shorter one."""
MAX_LIST_AGE_S: Final = 300.0
"""A leader that could not list the pools for so long is restarted by its liveness probe."""
MAX_WATCH_STALENESS_S: Final = 180.0
"""So is one whose watch has not told for so long what listings show; before that, silent streams are opened again."""
RESYNC_PER_POOL_S: Final = 0.3
"""With many pools the refresh slows down, so that the API server sees a bounded rate of requests."""
DEBOUNCE_S: Final = 0.5
"""A rollout changes a DaemonSet's status again and again."""


class Controller:
    """Level-triggered: events only say what to look at, and a refresh looks at everything without events.

    Of one kind, KVCachePool unless said otherwise. `background`: so many passes at once that nobody waits for.
    """

    def __init__(
        self,
        cluster: ApiClient,
        reconciler: Reconciler,
        metrics: OperatorMetrics,
        *,
        resync_period_s: float,
        background: int = 2,
        kind: str = KIND,
        watch_staleness: WatchStaleness | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cluster = cluster
        self._reconciler = reconciler
        self._metrics = metrics
        self._resync_period_s = resync_period_s
        self._kind = kind
        self._clock = clock
        self._backoff = Backoff()
        self._pools: set[NamespacedName] = set()
        self._listed: float | None = None
        self.queue = WorkQueue(background)
        self.watch_staleness = watch_staleness or WatchStaleness(clock=clock)

    @property
    def health_problem(self) -> str:
        """Why this process should be made anew; empty for as long as it sees what happens."""
        ago, deaf = self.seconds_since_list, self.watch_staleness.stale_seconds
        if MAX_LIST_AGE_S < ago < float("inf"):
            return f"the pools were not listed for {ago:.0f} s"
        return f"the watch of the pools has missed changes for {deaf:.0f} s" if deaf > MAX_WATCH_STALENESS_S else ""

    @property
    def seconds_since_list(self) -> float:
        """Seconds since the pools were last listed; infinite before that."""
        return self._clock() - self._listed if self._listed is not None else float("inf")

    def enqueue(self, namespace: str, name: str) -> None:
        """Something about this pool changed."""
        self.queue.add(NamespacedName(namespace, name))

    def enqueue_debounced(self, namespace: str, name: str) -> None:
        """An object of this pool changed: one pass for all that change in the same moment."""
        self.queue.add(NamespacedName(namespace, name), DEBOUNCE_S)

    def enqueue_background(self, namespace: str, name: str) -> None:
        """This pool, or an object of it, was listed: nobody waits."""
        self.queue.add(NamespacedName(namespace, name), background=True)

    def observe_event(self, pool: NamespacedName, version: str) -> bool:
        """The watch has told of this version of a pool. False: this operator made it, and knows what it says."""
        return self.watch_staleness.observe_event(pool, version)

    def enqueue_all(self) -> None:
        """Something changed that may concern any pool."""
        for key in self._pools:
            self.queue.add(key, DEBOUNCE_S, background=True)

    async def resync_loop(self) -> None:
        """List the pools again and again, and look at each. Missed events are made good here."""
        while True:
            try:
                found = await self._cluster.list(self._kind)
            except OperatorError as e:
                log.warning("%ss cannot be listed: %s", self._kind, e)
            else:
                before = self._pools
                self._pools = {_key(p) for p in found}
                self._listed = self._clock()
                if self._kind == KIND:
                    self.watch_staleness.observe_list({_key(p): p["metadata"]["resourceVersion"] for p in found})
                    self._metrics.deaf.set(self.watch_staleness.stale_seconds)
                    self._metrics.pools.set(len(self._pools))
                    self._metrics.listed.set_to_current_time()
                self._stagger(before)
            await asyncio.sleep(self.resync_interval_s)

    @property
    def resync_interval_s(self) -> float:
        """Seconds in which each pool is looked at once without any event."""
        return max(self._resync_period_s, RESYNC_PER_POOL_S * len(self._pools))

    def _stagger(self, known: set[NamespacedName]) -> None:
        """New pools at once, the others one after the other over the time until the next listing."""
        gap_s = self.resync_interval_s / max(1, len(self._pools))
        for place, key in enumerate(sorted(self._pools)):
            self.queue.add(key, place * gap_s if key in known else 0.0, background=True)

    async def work(self) -> None:
        """One worker; any number may run. Ends only with NotLeaderError."""
        while True:
            key = await self.queue.get()
            if self._kind == KIND:
                self._metrics.queued.set(len(self.queue))
            IS_FOREGROUND.set(functools.partial(self._is_foreground, key))
            try:
                await self._reconcile_key(key)
            finally:
                self.queue.done(key)

    def _is_foreground(self, key: NamespacedName) -> bool:
        return not self.queue.is_background(key)

    async def _reconcile_key(self, key: NamespacedName) -> None:
        started = self._clock()
        result = "ok"
        try:
            async with asyncio.timeout(RECONCILE_TIMEOUT_S):
                again = await self._reconciler.reconcile(*key)
        except NotLeaderError:
            raise
        except OperatorError as e:
            result = e.reason
            self._retry(key, str(e))
        except Exception as e:  # one pool's trouble must not end the worker that serves the others
            result = "Bug"
            log.exception("%s=%s/%s: unexpected", self._kind, *key)
            self._retry(key, type(e).__name__)
        else:
            self._backoff.succeeded(key)
            self._show(key, again)
            if again.requeue_after_s is not None:
                self.queue.add(key, again.requeue_after_s)
            for outcome in again.restarts:
                self._metrics.restarts.labels(outcome).inc()
        self._metrics.passes.labels(result).inc()
        self._metrics.seconds.observe(self._clock() - started)

    def _show(self, key: NamespacedName, enqueue_background: Result) -> None:
        if self._kind != KIND:
            return
        if enqueue_background.gone:
            self._metrics.status.forget(key)
        elif enqueue_background.status is not None:
            self._metrics.status.set_status(key, enqueue_background.status)

    def _retry(self, key: NamespacedName, why: str) -> None:
        pause = self._backoff.failed(key)
        log.warning("%s=%s/%s: %s; again in %.1f s", self._kind, *key, why, pause)
        self.queue.add(key, pause)


def _key(pool: Manifest) -> NamespacedName:
    return NamespacedName(pool["metadata"]["namespace"], pool["metadata"]["name"])
