"""Worker pool: reconciles queued keys, requeues failures with backoff, and resyncs periodically."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from dataclasses import dataclass
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

__all__ = ["Controller", "ControllerOptions"]

log = logging.getLogger(__name__)

RECONCILE_TIMEOUT_S: Final = 60.0
"""Longest time of one reconcile; each of its calls has a shorter timeout."""
MAX_LIST_AGE_S: Final = 300.0
"""The liveness probe restarts a leader that could not list its objects for this long."""
MAX_WATCH_STALENESS_S: Final = 180.0
"""It also restarts one whose watch missed a listed change for this long; silent streams are reconnected before."""
RESYNC_PER_POOL_S: Final = 0.3
"""With many objects the resync slows down, so that the API server receives a bounded rate of requests."""
DEBOUNCE_S: Final = 0.5
"""A rollout changes a DaemonSet's status many times in a row."""


@dataclass(frozen=True)
class ControllerOptions:
    """Settings of one controller."""

    resync_period_s: float
    kind: str = KIND
    background: int = 2
    """Number of background reconciles at the same time."""


class Controller:
    """Level-triggered: an event only names the object to reconcile, and the resync reconciles all without events."""

    def __init__(
        self,
        cluster: ApiClient,
        reconciler: Reconciler,
        metrics: OperatorMetrics,
        options: ControllerOptions,
        *,
        watch_staleness: WatchStaleness | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cluster = cluster
        self._reconciler = reconciler
        self._metrics = metrics
        self._resync_period_s = options.resync_period_s
        self._kind = options.kind
        self._label = options.kind.lower()
        self._clock = clock
        self._backoff = Backoff()
        self._keys: set[NamespacedName] = set()
        self._listed_at: float | None = None
        self.queue = WorkQueue(options.background)
        self.watch_staleness = watch_staleness or WatchStaleness(clock=clock)

    @property
    def health_problem(self) -> str:
        """Why this process should be restarted; empty while it is healthy."""
        list_age_s, stale_s = self.seconds_since_list, self.watch_staleness.stale_seconds
        if MAX_LIST_AGE_S < list_age_s < float("inf"):
            return f"{self._kind}s were not listed for {list_age_s:.0f} s"
        if stale_s > MAX_WATCH_STALENESS_S:
            return f"the watch of {self._kind}s has missed changes for {stale_s:.0f} s"
        return ""

    @property
    def listed_keys(self) -> frozenset[NamespacedName] | None:
        """The objects of the last list; None before the first one."""
        return frozenset(self._keys) if self._listed_at is not None else None

    @property
    def seconds_since_list(self) -> float:
        """Seconds since the objects were last listed; infinite before the first list."""
        return self._clock() - self._listed_at if self._listed_at is not None else float("inf")

    @property
    def resync_interval_s(self) -> float:
        """Seconds in which each object is reconciled once without any event."""
        return max(self._resync_period_s, RESYNC_PER_POOL_S * len(self._keys))

    def enqueue(self, namespace: str, name: str) -> None:
        """Reconcile the object now."""
        self.queue.add(NamespacedName(namespace, name))

    def enqueue_debounced(self, namespace: str, name: str) -> None:
        """Reconcile the object soon: once for all owned objects that change together."""
        self.queue.add(NamespacedName(namespace, name), DEBOUNCE_S)

    def enqueue_background(self, namespace: str, name: str) -> None:
        """Reconcile the object when no foreground work waits."""
        self.queue.add(NamespacedName(namespace, name), background=True)

    def enqueue_all(self) -> None:
        """Reconcile every object soon, in the background."""
        for key in self._keys:
            self.queue.add(key, DEBOUNCE_S, background=True)

    def observe_event(self, key: NamespacedName, version: str) -> bool:
        """Record that the watch delivered this version. False: this operator wrote it."""
        return self.watch_staleness.observe_event(key, version)

    async def resync_loop(self) -> None:
        """List all objects periodically and reconcile each: this makes up for missed events."""
        while True:
            try:
                manifests = await self._cluster.list(self._kind)
            except OperatorError as e:
                log.warning("%ss cannot be listed: %s", self._kind, e)
            else:
                self._resync(manifests)
            await asyncio.sleep(self.resync_interval_s)

    def _resync(self, manifests: list[Manifest]) -> None:
        previous = self._keys
        self._keys = {_key(m) for m in manifests}
        self._listed_at = self._clock()
        if self._kind == KIND:
            self.watch_staleness.observe_list({_key(m): m["metadata"]["resourceVersion"] for m in manifests})
            self._metrics.watch_stale.set(self.watch_staleness.stale_seconds)
            self._metrics.pools.set(len(self._keys))
            self._metrics.last_list.set_to_current_time()
        self._stagger(previous)

    def _stagger(self, known: set[NamespacedName]) -> None:
        """Enqueue new objects now, and the others evenly over the time until the next list."""
        gap_s = self.resync_interval_s / max(1, len(self._keys))
        for place, key in enumerate(sorted(self._keys)):
            self.queue.add(key, place * gap_s if key in known else 0.0, background=True)

    async def work(self) -> None:
        """Run one worker; any number may run. Ends only with NotLeaderError."""
        while True:
            key = await self.queue.get()
            self._metrics.workqueue_depth.labels(self._label).set(len(self.queue))
            IS_FOREGROUND.set(functools.partial(self._is_foreground, key))
            try:
                await self._reconcile_key(key)
            finally:
                self.queue.done(key)

    def _is_foreground(self, key: NamespacedName) -> bool:
        return not self.queue.is_background(key)

    async def _reconcile_key(self, key: NamespacedName) -> None:
        started = self._clock()
        outcome = "ok"
        try:
            async with asyncio.timeout(RECONCILE_TIMEOUT_S):
                result = await self._reconciler.reconcile(*key)
        except NotLeaderError:
            raise
        except OperatorError as e:
            outcome = e.reason
            self._requeue_failed(key, str(e))
        except Exception as e:  # a bug with one object must not end the worker that serves the others
            outcome = "Bug"
            log.exception("%s=%s: unexpected error", self._kind, key)
            self._requeue_failed(key, type(e).__name__)
        else:
            self._backoff.succeeded(key)
            self._record(key, result)
            if result.requeue_after_s is not None:
                self.queue.add(key, result.requeue_after_s)
        self._metrics.reconciles.labels(self._label, outcome).inc()
        self._metrics.reconcile_time.labels(self._label).observe(self._clock() - started)

    def _record(self, key: NamespacedName, result: Result) -> None:
        for restart in result.restarts:
            self._metrics.restarts.labels(restart).inc()
        if self._kind != KIND:
            return
        if result.gone:
            self._metrics.status.forget(key)
        elif result.status is not None:
            self._metrics.status.set_status(key, result.status)

    def _requeue_failed(self, key: NamespacedName, message: str) -> None:
        pause_s = self._backoff.failed(key)
        log.warning("%s=%s: the reconcile failed: %s; retrying in %.1f s", self._kind, key, message, pause_s)
        self.queue.add(key, pause_s)


def _key(manifest: Manifest) -> NamespacedName:
    return NamespacedName(manifest["metadata"]["namespace"], manifest["metadata"]["name"])
