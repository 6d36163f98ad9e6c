"""One pass over one KVCacheOperation: ask the nodes, write what they said. Writes to operations alone."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from kvpool_operator.api.annotations import FINALIZER_OPERATION
from kvpool_operator.api.conditions import Condition, set_condition
from kvpool_operator.api.duration import to_ms
from kvpool_operator.api.operation import KIND, KVCacheOperation, OperationStatus
from kvpool_operator.api.tenant import TENANT_KIND
from kvpool_operator.api.v1alpha1 import API_VERSION, KVCachePool, Metadata
from kvpool_operator.api.v1alpha1 import KIND as POOL_KIND
from kvpool_operator.desired import labels, names
from kvpool_operator.desired.secrets import read_secret
from kvpool_operator.errors import InvalidPoolError, OperatorError, SidecarRejectedError, SidecarUnavailableError
from kvpool_operator.k8s import pods as podview
from kvpool_operator.k8s.client import ObjectRef
from kvpool_operator.observe.active_sidecar import active_sidecars
from kvpool_operator.observe.sidecar_poll import poll_sidecars
from kvpool_operator.operations.state import NodeResult, OperationState
from kvpool_operator.operations.steps import caveat, resolve_tenant, steps_of
from kvpool_operator.pools.secrets import generate_secret
from kvpool_operator.runtime.reconciler import Result
from kvpool_operator.sidecars.operation import SidecarAddress
from kvpool_operator.times import rfc3339

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvpool_operator.desired.inputs import PoolSecret
    from kvpool_operator.k8s.client import ApiClient, Manifest
    from kvpool_operator.operations.steps import Step
    from kvpool_operator.sidecars.admin_client import SidecarAdminClient
    from kvpool_operator.sidecars.status_client import StatusClient

__all__ = ["FINALIZER_OPERATION", "OperationReconciler"]

log = logging.getLogger(__name__)

MIN_REQUEUE_S: Final = 1.0
MAX_REQUEUE_S: Final = 5.0
"""A long operation is looked at less often: a twentieth of the time that it has run, at most this."""
CANCEL_TIMEOUT_S: Final = 30.0
"""A deleted operation waits so long for nodes that do not answer."""
FINISHED: Final = ("Succeeded", "Failed", "Cancelled")


class OperationReconciler:
    """Remembers what the nodes said of the operations that run, by uid; see `OperationState` for what a restart
    costs."""

    def __init__(
        self,
        cluster: ApiClient,
        commands: SidecarAdminClient,
        scraper: StatusClient,
        *,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cluster = cluster
        self._commands = commands
        self._scraper = scraper
        self._now = now
        self._clock = clock
        self._courses: dict[str, OperationState] = {}
        self._written: dict[str, float] = {}
        self._uids: dict[tuple[str, str], str] = {}

    async def reconcile(self, namespace: str, name: str) -> Result:
        """Bring one operation a step further. Raises RetryableError when that must be repeated."""
        raw = await self._cluster.get(ObjectRef(KIND, namespace, name))
        uid = "" if raw is None else str(raw["metadata"].get("uid", ""))
        known = self._uids.get((namespace, name))
        if known is not None and known != uid:
            self._forget((namespace, name))
        if raw is None:
            return Result(gone=True)
        self._uids[namespace, name] = uid
        meta = Metadata.model_validate(raw["metadata"])
        status = raw.get("status") if isinstance(raw.get("status"), dict) else {}
        if meta.deletion_timestamp:
            return await self._cancel(raw, meta)
        if status and status.get("phase") in FINISHED:
            return await self._finished(raw, meta)
        try:
            operation = KVCacheOperation.parse(raw)
        except InvalidPoolError as e:
            return await self._end(raw, meta, OperationStatus(phase="Failed", message=str(e)[:1024]))
        if FINALIZER_OPERATION not in meta.finalizers:
            await self._edit(meta, [*meta.finalizers, FINALIZER_OPERATION])
            return Result(requeue_after_s=0.0)
        return await self._go_on(raw, operation)

    async def _go_on(self, raw: Manifest, operation: KVCacheOperation) -> Result:
        meta = operation.metadata
        began = str((raw.get("status") or {}).get("startTime") or "")
        pool = await self._pool(operation)
        if isinstance(pool, str):
            if pool.startswith("Cancelled"):
                return await self._end(raw, meta, OperationStatus(phase="Cancelled", message=pool))
            if self._late(operation, str(meta.creation_timestamp)):
                return await self._end(raw, meta, OperationStatus(phase="Failed", message=pool))
            await self._write(raw, meta, OperationStatus(phase="Pending", message=pool))
            return Result(requeue_after_s=MAX_REQUEUE_S)
        if not began and pool.spec.mode != "Enforce":
            told = f"spec.mode of pool {pool.metadata.name} is {pool.spec.mode}: this begins when it is Enforce"
            await self._write(raw, meta, OperationStatus(phase="Pending", message=told))
            return Result(requeue_after_s=MAX_REQUEUE_S)
        secret = await self._secret(pool)
        targets = await self._targets(pool)
        if meta.uid not in self._courses:
            try:
                self._courses[meta.uid] = await self._course(operation, pool)
            except LookupError as e:
                return await self._end(raw, meta, OperationStatus(phase="Failed", message=str(e)))
        course = self._courses[meta.uid]
        late = self._late(operation, began or self._stamp())
        if secret is not None and not late:
            requests = course.requests(targets)
            await asyncio.gather(*(self._order(meta.uid, course, secret, number, to) for number, to in requests))
        status = course.status(sorted(t.node for t in targets), late=late)
        status = status.model_copy(update={"start_time": began or self._stamp()})
        if status.phase in FINISHED:
            if late and secret is not None:
                await self._cancel_on(meta.uid, course, secret, targets)
            return await self._end(raw, meta, status)
        await self._write(raw, meta, status)
        return Result(requeue_after_s=min(MAX_REQUEUE_S, max(MIN_REQUEUE_S, self._age(status.start_time or "") / 20)))

    async def _order(
        self, uid: str, course: OperationState, secret: PoolSecret, number: int, to: SidecarAddress
    ) -> None:
        """Ask one node; what it says is kept."""
        step: Step = course.steps[number]
        name = f"{uid}-{number}"
        old = course.said.get((number, to.node), NodeResult())
        try:
            progress = None
            if old.progress is not None:
                progress = await self._commands.poll(secret, to, name)
            earlier = old.earlier
            if progress is None:  # not asked yet, or its sidecar has restarted since
                earlier = _sum(old.earlier, old.progress.counts if old.progress is not None else {})
                progress = await self._commands.start(secret, to, name, step.kind, step.params)
        except SidecarUnavailableError as e:
            course.said[number, to.node] = replace(old, problem=str(e), unanswered=old.unanswered + 1)
        except SidecarRejectedError as e:
            course.said[number, to.node] = NodeResult(problem=str(e), is_final=True)
        else:
            course.said[number, to.node] = NodeResult(progress, earlier=earlier)

    # -- end

    async def _end(self, raw: Manifest, meta: Metadata, status: OperationStatus) -> Result:
        await self._write(raw, meta, status.model_copy(update={"completion_time": self._stamp()}))
        self._courses.pop(meta.uid, None)
        log.info("operation=%s/%s: %s: %s", meta.namespace, meta.name, status.phase, status.message)
        return Result(requeue_after_s=0.0)

    async def _finished(self, raw: Manifest, meta: Metadata) -> Result:
        """Let it go when it is deleted, and delete it when its time has come."""
        if FINALIZER_OPERATION in meta.finalizers:
            await self._edit(meta, [name for name in meta.finalizers if name != FINALIZER_OPERATION])
        kept_s = float((raw.get("spec") or {}).get("ttlSecondsAfterFinished", 604_800))
        left = kept_s - self._age(str(raw["status"].get("completionTime") or meta.creation_timestamp))
        if left > 0:
            return Result(requeue_after_s=left + MIN_REQUEUE_S)
        await self._cluster.delete(ObjectRef(KIND, meta.namespace, meta.name), uid=meta.uid)
        return Result()

    async def _cancel(self, raw: Manifest, meta: Metadata) -> Result:
        """It was deleted: have the nodes end what runs, and let it go, after a while whatever they say."""
        if FINALIZER_OPERATION not in meta.finalizers:
            return Result()
        running = (raw.get("status") or {}).get("phase") == "Running"
        overdue = self._age(str(meta.deletion_timestamp)) > CANCEL_TIMEOUT_S
        if running and not overdue and not await self._cancelled_everywhere(raw, meta):
            return Result(requeue_after_s=MIN_REQUEUE_S)
        if running:
            with contextlib.suppress(OperatorError):  # for who still watches; the object goes whatever comes of this
                ended = OperationStatus.model_validate(raw["status"])
                update = {"phase": "Cancelled", "message": "deleted", "completion_time": self._stamp()}
                await self._write(raw, meta, ended.model_copy(update=update))
        fresh = await self._cluster.get(ObjectRef(KIND, meta.namespace, meta.name))
        if fresh is not None:
            meta = Metadata.model_validate(fresh["metadata"])
            await self._edit(meta, [name for name in meta.finalizers if name != FINALIZER_OPERATION])
        self._forget((meta.namespace, meta.name))
        return Result()

    async def _cancelled_everywhere(self, raw: Manifest, meta: Metadata) -> bool:
        try:
            operation = KVCacheOperation.parse(raw)
        except InvalidPoolError:
            return True
        pool = await self._pool(operation)
        if isinstance(pool, str):
            return True
        secret = await self._secret(pool)
        course = self._courses.get(meta.uid) or OperationState(steps_of(operation, pool))
        return secret is None or await self._cancel_on(meta.uid, course, secret, await self._targets(pool))

    async def _cancel_on(
        self, uid: str, course: OperationState, secret: PoolSecret, targets: Sequence[SidecarAddress]
    ) -> bool:
        """Whether every node has heard it."""

        async def one(number: int, to: SidecarAddress) -> bool:
            try:
                await self._commands.cancel(secret, to, f"{uid}-{number}")
            except (SidecarUnavailableError, SidecarRejectedError):
                return False
            return True

        target_nodes = [(n, to) for n in range(len(course.steps)) for to in targets if to.address]
        return all(await asyncio.gather(*(one(number, to) for number, to in target_nodes)))

    # -- what there is

    async def _course(self, operation: KVCacheOperation, pool: KVCachePool) -> OperationState:
        """LookupError if there is no such tenant."""
        wish = operation.spec.purge
        about_pool = caveat(operation, pool)
        if wish is None or wish.tenant is None:
            return OperationState(steps_of(operation, pool), note=about_pool)
        tenants = await self._cluster.list(TENANT_KIND, namespace=operation.metadata.namespace)
        tenant, note = resolve_tenant(operation, tenants)
        return OperationState(steps_of(operation, pool, tenant), note=note + about_pool)

    async def _pool(self, operation: KVCacheOperation) -> KVCachePool | str:
        """The pool, or why there is none to work on."""
        name = operation.spec.pool_ref.name
        raw = await self._cluster.get(ObjectRef(POOL_KIND, operation.metadata.namespace, name))
        if raw is None:
            return f"there is no pool {name} in this namespace"
        try:
            pool = KVCachePool.parse(raw)
        except InvalidPoolError:
            return f"the spec of pool {name} cannot be understood: see its conditions"
        if pool.metadata.deletion_timestamp:
            return f"Cancelled: pool {name} is being deleted"
        return pool

    async def _secret(self, pool: KVCachePool) -> PoolSecret | None:
        meta = pool.metadata
        live = await self._cluster.get(ObjectRef("Secret", meta.namespace, names.secret(meta.name)))
        return None if live is None else read_secret(live, generate_secret(""))

    async def _targets(self, pool: KVCachePool) -> list[SidecarAddress]:
        """A sidecar for each node that has or is to have one; without an address while it cannot be asked.

        Where two pods stand on a node, they are asked which of them serves.
        """
        wanted = ",".join(f"{k}={v}" for k, v in sorted(labels.selector(pool, "sidecar").items()))
        pods = await self._cluster.list("Pod", namespace=pool.metadata.namespace, labels=wanted)
        living = [p for p in pods if "deletionTimestamp" not in p["metadata"]]
        count = Counter(podview.node(p) for p in living)
        reports = await poll_sidecars(self._scraper, [p for p in living if count[podview.node(p)] > 1])
        found = {podview.node(p): "" for p in pods} | {s.node: s.address for s in active_sidecars(living, reports)}
        return [SidecarAddress(node, address) for node, address in sorted(found.items()) if node]

    # -- writing

    async def _write(self, raw: Manifest, meta: Metadata, status: OperationStatus) -> None:
        old = raw.get("status") if isinstance(raw.get("status"), dict) else {}
        ended = status.phase in FINISHED
        condition = Condition(
            type="Complete",
            status="True" if ended else "False",
            observed_generation=meta.generation,
            reason=status.phase,
            message=status.message,
        )
        conditions = set_condition(list((old or {}).get("conditions") or []), condition, self._stamp())
        new = {**status.dump(), "conditions": conditions}
        if new == old or not self._worth_writing(meta.uid, old or {}, new):
            return
        manifest = {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "metadata": {"name": meta.name, "namespace": meta.namespace},
            "status": new,
        }
        await self._cluster.apply(manifest, subresource="status")

    def _worth_writing(self, uid: str, old: Manifest, new: Manifest) -> bool:
        """Numbers that go up are written now and then; a phase that changes, or a node that is done, at once."""
        now = self._clock()
        urgent = any(old.get(what) != new.get(what) for what in ("phase", "nodes", "failures"))
        if not urgent and now - self._written.get(uid, float("-inf")) < MAX_REQUEUE_S:
            return False
        self._written[uid] = now
        return True

    async def _edit(self, meta: Metadata, finalizers: list[str]) -> None:
        patch = {"metadata": {"resourceVersion": meta.resource_version, "finalizers": finalizers}}
        await self._cluster.patch(ObjectRef(KIND, meta.namespace, meta.name), patch)

    def _forget(self, key: tuple[str, str]) -> None:
        uid = self._uids.pop(key, "")
        self._courses.pop(uid, None)
        self._written.pop(uid, None)

    def _late(self, operation: KVCacheOperation, since: str) -> bool:
        return self._age(since) > to_ms(operation.spec.timeout) / 1000

    def _age(self, since: str) -> float:
        """Seconds; 0 for no time."""
        try:
            return (self._now() - datetime.fromisoformat(since)).total_seconds()
        except ValueError:
            return 0.0

    def _stamp(self) -> str:
        return rfc3339(self._now())


def _sum(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return dict(Counter(one) + Counter(other))
