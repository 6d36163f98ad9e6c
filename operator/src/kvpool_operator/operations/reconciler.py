"""Reconciles one KVCacheOperation: send its requests to the nodes, report the results. Writes operations only."""

from __future__ import annotations

import contextlib
import logging
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from kvpool_operator.api.annotations import FINALIZER_OPERATION
from kvpool_operator.api.conditions import Verdict, with_verdicts
from kvpool_operator.api.duration import to_ms
from kvpool_operator.api.operation import KIND, KVCacheOperation, OperationStatus
from kvpool_operator.api.reasons import Reason
from kvpool_operator.api.v1alpha1 import API_VERSION, KVCachePool, Metadata
from kvpool_operator.errors import InvalidPoolError, OperatorError
from kvpool_operator.k8s.client import NamespacedName, ObjectRef
from kvpool_operator.k8s.status_writer import StatusParts, StatusWriter
from kvpool_operator.operations.executor import OperationExecutor
from kvpool_operator.operations.pool_access import PoolAccess
from kvpool_operator.operations.state import OperationState
from kvpool_operator.operations.steps import caveat, resolve_tenant, steps_of
from kvpool_operator.pki.authority_root import AuthorityRoot
from kvpool_operator.runtime.reconciler import Result
from kvpool_operator.times import elapsed_s, rfc3339

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpool_operator.k8s.client import ApiClient, Manifest
    from kvpool_operator.sidecars.admin_client import SidecarAdminClient
    from kvpool_operator.sidecars.status_client import StatusClient

__all__ = ["OperationReconciler"]

log = logging.getLogger(__name__)

MIN_REQUEUE_S: Final = 1.0
MAX_REQUEUE_S: Final = 5.0
"""An operation is requeued after a twentieth of the time that it has run, between these two."""
CANCEL_TIMEOUT_S: Final = 30.0
"""Longest wait of a deleted operation for nodes that do not answer."""
FINISHED: Final = ("Succeeded", "Failed", "Cancelled")


class OperationReconciler:
    """Keeps the results of running operations in memory, by uid; `OperationState` says what a restart costs."""

    def __init__(
        self,
        cluster: ApiClient,
        admin_client: SidecarAdminClient,
        status_client: StatusClient,
        *,
        root: AuthorityRoot | None = None,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cluster = cluster
        self._pools = PoolAccess(cluster, status_client, root or AuthorityRoot.generate())
        self._executor = OperationExecutor(admin_client)
        self._statuses = StatusWriter(cluster, StatusParts(_stable_part), interval_s=MAX_REQUEUE_S, clock=clock)
        self._now = now
        self._states: dict[str, OperationState] = {}
        self._uids: dict[NamespacedName, str] = {}

    async def reconcile(self, namespace: str, name: str) -> Result:
        """Bring one operation a step further. RetryableError: repeat it with backoff."""
        key = NamespacedName(namespace, name)
        raw = await self._cluster.get(ObjectRef(KIND, namespace, name))
        uid = "" if raw is None else str(raw["metadata"].get("uid", ""))
        if self._uids.get(key, uid) != uid:
            self._forget(key)
        if raw is None:
            return Result(gone=True)
        self._uids[key] = uid
        meta = Metadata.model_validate(raw["metadata"])
        if meta.deletion_timestamp:
            return await self._cancel(raw, meta)
        if _status(raw).get("phase") in FINISHED:
            return await self._retire(raw, meta)
        try:
            operation = KVCacheOperation.parse(raw)
        except InvalidPoolError as e:
            return await self._end(raw, meta, OperationStatus(phase="Failed", message=str(e)[:1024]))
        if FINALIZER_OPERATION not in meta.finalizers:
            await self._set_finalizers(meta, [*meta.finalizers, FINALIZER_OPERATION])
            return Result(requeue_after_s=0.0)
        return await self._progress(raw, operation)

    async def _progress(self, raw: Manifest, operation: KVCacheOperation) -> Result:
        """Start the operation, or continue it."""
        meta = operation.metadata
        started = str(_status(raw).get("startTime") or "")
        found = await self._pools.lookup(operation)
        if found.pool is None:
            if found.is_deleting:
                return await self._end(raw, meta, OperationStatus(phase="Cancelled", message=found.problem))
            if self._is_overdue(operation, str(meta.creation_timestamp)):
                return await self._end(raw, meta, OperationStatus(phase="Failed", message=found.problem))
            return await self._wait(raw, meta, found.problem)
        pool = found.pool
        if not started and pool.spec.mode != "Enforce":
            return await self._wait(
                raw,
                meta,
                f"spec.mode of KVCachePool {pool.metadata.name} is {pool.spec.mode}: the operation starts when it is "
                "Enforce",
            )
        secret = await self._pools.secret(pool)
        sidecars = await self._pools.sidecars(pool)
        if meta.uid not in self._states:
            try:
                self._states[meta.uid] = await self._new_state(operation, pool)
            except LookupError as e:
                return await self._end(raw, meta, OperationStatus(phase="Failed", message=str(e)))
        state = self._states[meta.uid]
        timed_out = self._is_overdue(operation, started or self._stamp())
        if secret is not None and not timed_out:
            await self._executor.run(meta.uid, state, secret, sidecars)
        status = state.status(sorted(s.node for s in sidecars), timed_out=timed_out)
        status = status.model_copy(update={"start_time": started or self._stamp()})
        if status.phase in FINISHED:
            if timed_out and secret is not None:
                await self._executor.cancel(meta.uid, state, secret, sidecars)
            return await self._end(raw, meta, status)
        await self._write(raw, meta, status)
        age_s = elapsed_s(status.start_time or "", self._now())
        return Result(requeue_after_s=min(MAX_REQUEUE_S, max(MIN_REQUEUE_S, age_s / 20)))

    async def _new_state(self, operation: KVCacheOperation, pool: KVCachePool) -> OperationState:
        """The state before the first request. LookupError: the purge names a tenant that does not exist."""
        request = operation.spec.purge
        pool_caveat = caveat(operation, pool)
        if request is None or request.tenant is None:
            return OperationState(steps_of(operation, pool), caveat=pool_caveat)
        tenants = await self._pools.tenants(operation.metadata.namespace)
        tenant, tenant_caveat = resolve_tenant(operation, tenants)
        return OperationState(steps_of(operation, pool, tenant), caveat=tenant_caveat + pool_caveat)

    # -- ends

    async def _wait(self, raw: Manifest, meta: Metadata, message: str) -> Result:
        """The operation cannot start yet."""
        await self._write(raw, meta, OperationStatus(phase="Pending", message=message))
        return Result(requeue_after_s=MAX_REQUEUE_S)

    async def _end(self, raw: Manifest, meta: Metadata, status: OperationStatus) -> Result:
        await self._write(raw, meta, status.model_copy(update={"completion_time": self._stamp()}))
        self._states.pop(meta.uid, None)
        log.info("operation=%s/%s: %s: %s", meta.namespace, meta.name, status.phase, status.message)
        return Result(requeue_after_s=0.0)

    async def _retire(self, raw: Manifest, meta: Metadata) -> Result:
        """Remove the finalizer of a finished operation, and delete it after its TTL."""
        if FINALIZER_OPERATION in meta.finalizers:
            await self._remove_finalizer(meta)
        ttl_s = float((raw.get("spec") or {}).get("ttlSecondsAfterFinished", 604_800))
        completed = str(_status(raw).get("completionTime") or meta.creation_timestamp)
        left_s = ttl_s - elapsed_s(completed, self._now())
        if left_s > 0:
            return Result(requeue_after_s=left_s + MIN_REQUEUE_S)
        await self._cluster.delete(ObjectRef(KIND, meta.namespace, meta.name), uid=meta.uid)
        return Result()

    async def _cancel(self, raw: Manifest, meta: Metadata) -> Result:
        """The operation was deleted: cancel it on the nodes and remove the finalizer, at the latest after a timeout."""
        if FINALIZER_OPERATION not in meta.finalizers:
            return Result()
        is_running = _status(raw).get("phase") == "Running"
        is_overdue = elapsed_s(str(meta.deletion_timestamp), self._now()) > CANCEL_TIMEOUT_S
        if is_running and not is_overdue and not await self._cancelled_everywhere(raw, meta):
            return Result(requeue_after_s=MIN_REQUEUE_S)
        if is_running:
            with contextlib.suppress(OperatorError):  # for watchers only; the object is deleted in any case
                ended = OperationStatus.model_validate(raw["status"])
                update = {"phase": "Cancelled", "message": "deleted", "completion_time": self._stamp()}
                await self._write(raw, meta, ended.model_copy(update=update))
        live = await self._cluster.get(ObjectRef(KIND, meta.namespace, meta.name))
        if live is not None:
            await self._remove_finalizer(Metadata.model_validate(live["metadata"]))
        self._forget(NamespacedName(meta.namespace, meta.name))
        return Result()

    async def _cancelled_everywhere(self, raw: Manifest, meta: Metadata) -> bool:
        try:
            operation = KVCacheOperation.parse(raw)
        except InvalidPoolError:
            return True
        pool = (await self._pools.lookup(operation)).pool
        if pool is None:
            return True
        secret = await self._pools.secret(pool)
        state = self._states.get(meta.uid) or OperationState(steps_of(operation, pool))
        if secret is None:
            return True
        return await self._executor.cancel(meta.uid, state, secret, await self._pools.sidecars(pool))

    # -- writes

    async def _write(self, raw: Manifest, meta: Metadata, status: OperationStatus) -> None:
        verdict = Verdict("True" if status.phase in FINISHED else "False", Reason[status.phase.upper()], status.message)
        conditions = with_verdicts(
            _status(raw).get("conditions"), {"Complete": verdict}, meta.generation, self._stamp()
        )
        self._statuses.record(ObjectRef(KIND, meta.namespace, meta.name), _status(raw))
        manifest = {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "metadata": {"name": meta.name, "namespace": meta.namespace},
        }
        await self._statuses.write(manifest, {**status.dump(), "conditions": conditions})

    async def _remove_finalizer(self, meta: Metadata) -> None:
        await self._set_finalizers(meta, [name for name in meta.finalizers if name != FINALIZER_OPERATION])

    async def _set_finalizers(self, meta: Metadata, finalizers: list[str]) -> None:
        patch = {"metadata": {"resourceVersion": meta.resource_version, "finalizers": finalizers}}
        await self._cluster.patch(ObjectRef(KIND, meta.namespace, meta.name), patch)

    def _forget(self, key: NamespacedName) -> None:
        self._states.pop(self._uids.pop(key, ""), None)
        self._statuses.forget(ObjectRef(KIND, key.namespace, key.name))

    def _is_overdue(self, operation: KVCacheOperation, since: str) -> bool:
        return elapsed_s(since, self._now()) > to_ms(operation.spec.timeout) / 1000

    def _stamp(self) -> str:
        return rfc3339(self._now())


def _status(raw: Manifest) -> Manifest:
    status = raw.get("status")
    return status if isinstance(status, dict) else {}


def _stable_part(status: Manifest) -> Manifest:
    """Fields whose change is written immediately; progress counters may wait."""
    return {k: status.get(k) for k in ("phase", "nodes", "failures")}
