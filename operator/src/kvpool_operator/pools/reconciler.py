"""One pass over one pool: observe, decide, apply, tell. Everything clever is in the modules it calls."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from kvpool.config import digest
from kvpool_operator.api.duration import to_ms
from kvpool_operator.api.v1alpha1 import KIND, KVCachePool, Metadata
from kvpool_operator.desired import Inputs, build, names
from kvpool_operator.desired.cleanup import build_cleanup
from kvpool_operator.desired.configmap import config_text
from kvpool_operator.desired.dry_run import rendered_configmap
from kvpool_operator.desired.index import memory_of
from kvpool_operator.desired.preflight import build_preflight, preflight_spec
from kvpool_operator.desired.secrets import read_secret
from kvpool_operator.errors import InvalidPoolError
from kvpool_operator.injection.revision import revisions
from kvpool_operator.k8s.client import NamespacedName, ObjectRef
from kvpool_operator.observe.observer import WATCHED_KINDS
from kvpool_operator.pki.peer_ca import peer_files
from kvpool_operator.pools.apply import ApplyResult, apply_plan, write_status, write_tenant_status
from kvpool_operator.pools.conditions import ReconcileOutcome
from kvpool_operator.pools.password_rotation import nodes_without_new_password, requested_revision, rotate_password
from kvpool_operator.pools.plan import (
    Plan,
    affected_kinds,
    plan,
    plan_cleanup,
    plan_dry_run,
    plan_during_preflight,
    summarize_changes,
)
from kvpool_operator.pools.pod_evictor import EvictionRound, PodEvictor
from kvpool_operator.pools.secret_generator import make_secret
from kvpool_operator.pools.status import NUMBERS_EVERY_S, invalid_status, make_status, worth_writing
from kvpool_operator.preflight.gate import PreflightResult
from kvpool_operator.runtime.reconciler import Result
from kvpool_operator.tenants.resolver import orphan_status, tenant_status, to_configs
from kvpool_operator.times import rfc3339

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpool.config import TenantConfig
    from kvpool_operator.desired.inputs import InstallationConfig, PoolSecret
    from kvpool_operator.k8s.client import ApiClient, Manifest
    from kvpool_operator.nodes.reconciler import NodeReconciler
    from kvpool_operator.observe.observer import Observer
    from kvpool_operator.observe.snapshot import Snapshot
    from kvpool_operator.pools.config_push import ConfigPusher

__all__ = ["PoolReconciler"]

log = logging.getLogger(__name__)

SOON_S: Final = 1.0
DEFAULT_CLEANUP_S: Final = 300.0


class PoolReconciler:
    """Holds what is the same for all passes, and when each pool's status was last written."""

    def __init__(
        self,
        cluster: ApiClient,
        observer: Observer,
        env: InstallationConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        nodes: NodeReconciler | None = None,
        reloads: ConfigPusher | None = None,
        wrote: Callable[[NamespacedName, str], None] = lambda _pool, _version: None,
    ) -> None:
        """`wrote(pool, version)`: this version of a pool says nothing that needs a pass; it has the status of one."""
        self._wrote = wrote
        self._cluster = cluster
        self._observer = observer
        self._env = env
        self._clock = clock
        self._now = now
        self._nodes = nodes
        self._reloads = reloads
        self._written: dict[str, float] = {}
        self._restarts = PodEvictor(cluster, clock=clock)

    async def reconcile(self, namespace: str, name: str) -> Result:
        """Bring one pool a step nearer to what it should be. Raises RetryableError when that must be repeated."""
        raw = await self._cluster.get(ObjectRef(KIND, namespace, name))
        if raw is None:
            self._written.pop(f"{namespace}/{name}", None)
            self._restarts.forget(f"{namespace}/{name}")
            self._observer.forget(namespace, name)
            if self._nodes is not None:
                self._nodes.forget(namespace, name)
            if self._reloads is not None:
                self._reloads.forget(f"{namespace}/{name}")
            for tenant in await self._observer.tenants_of(namespace, name):
                await self._tell_tenant(tenant, orphan_status(tenant, name, self._stamp()))
            return Result(gone=True)
        meta, pool, problem = _read(raw)
        observed = await self._observer.observe(raw, meta, pool)
        secret = _secret(meta, pool, observed, self._now())
        inputs = self._inputs(pool, secret, observed) if pool else None
        gate = self._gate(pool, inputs, observed)
        steps = self._plan(meta, pool, inputs, observed, gate)
        if affected_kinds(steps) - set(WATCHED_KINDS):
            self._observer.forget(namespace, name)
        outcome = await apply_plan(steps, meta, self._cluster)
        if steps.done and not outcome.rejections:
            return Result(gone=True)
        living = pool is not None and not meta.deletion_timestamp and not observed.namespace_terminating
        watched = await self._watch(pool, observed) if pool is not None and living else EvictionRound()
        text = config_text(inputs) if inputs else ""
        wanted = digest(text) if text else ""
        applied = len(outcome.applied) + len(outcome.pruned)
        behind = tuple(nodes_without_new_password(secret, observed.sidecars)) if secret.managed_index_previous else ()
        progress = ReconcileOutcome(applied, steps.waiting, outcome.rejections, watched.problem, gate, wanted, behind)
        known = secret.pool_id if observed.objects or outcome.applied else ""
        status = await self._tell(meta, pool, problem, observed, progress, known)
        if pool is not None:
            await self._tell_tenants(pool, observed, secret, wanted)
        brought = living and await self._bring(meta, observed, outcome, secret, text, wanted)
        drains_s = None
        if self._nodes is not None and pool is not None and living and pool.spec.mode != "DryRun":
            drains_s = await self._nodes.reconcile(pool, observed, secret)
        return Result(
            requeue_after_s=SOON_S if steps.waiting or outcome.applied or outcome.pruned or brought else drains_s,
            status=status,
            restarts=watched.outcomes,
        )

    async def _bring(
        self, meta: Metadata, observed: Snapshot, outcome: ApplyResult, secret: PoolSecret, text: str, wanted: str
    ) -> bool:
        """Have sidecars take at once what is in the ConfigMap; nothing that is not there."""
        target = ObjectRef("ConfigMap", meta.namespace, names.config(meta.name))
        there = (observed.objects.get(target) or {}).get("data") or {}
        if self._reloads is None or not text or (target not in outcome.applied and there.get("pool.json") != text):
            return False
        return await self._reloads.push(f"{meta.namespace}/{meta.name}", observed, secret, text, wanted)

    async def _watch(self, pool: KVCachePool, observed: Snapshot) -> EvictionRound:
        target = f"{self._env.sidecar_image} {sorted(revisions(pool).items())}"
        return await self._restarts.look(pool, observed, target)

    def _inputs(self, pool: KVCachePool, secret: PoolSecret, observed: Snapshot) -> Inputs:
        tenants = to_configs(observed.tenants, pool.spec)
        return _inputs(pool, self._env, secret, observed, tenants)

    def _gate(self, pool: KVCachePool | None, inputs: Inputs | None, observed: Snapshot) -> PreflightResult:
        """Whether sidecars may be made or changed, by what was found on the nodes."""
        told = observed.status.get("preflight")
        told = told if isinstance(told, dict) else {}
        if pool is None or inputs is None:
            return PreflightResult.from_status("Warn", told)
        policy, mode = pool.spec.preflight, pool.spec.mode
        if pool.metadata.deletion_timestamp or mode == "Paused" or observed.external_problem:
            return PreflightResult.from_status(policy, told)
        spec = preflight_spec(inputs)
        return PreflightResult.evaluate(policy, spec, observed.looks, told, self._now(), dry_run=mode == "DryRun")

    def _plan(
        self, meta: Metadata, pool: KVCachePool | None, inputs: Inputs | None, observed: Snapshot, gate: PreflightResult
    ) -> Plan:
        if meta.deletion_timestamp:
            return plan_cleanup(
                meta,
                _policy(observed.raw),
                build_cleanup(inputs) if inputs else None,
                observed,
                overdue=self._overdue(meta, pool),
            )
        if inputs is None or observed.namespace_terminating:
            return Plan()
        if inputs.pool.spec.mode == "Paused" or observed.external_problem:
            return Plan()
        looks = build_preflight(inputs) if gate.is_running else None
        waiting = (
            f"the preflight checks of {gate.unresponsive} of {gate.nodes} nodes" if gate.state == "Checking" else ""
        )
        if inputs.pool.spec.mode == "DryRun":
            wanted = build(_shown(inputs, observed))
            shown = rendered_configmap(inputs.pool, wanted, summarize_changes(meta, wanted, observed))
            return plan_dry_run(meta, shown, looks, observed, waiting)
        if looks is not None:
            return plan_during_preflight(meta, build(inputs), looks, observed, waiting)
        return plan(meta, build(inputs), observed)

    def _overdue(self, meta: Metadata, pool: KVCachePool | None) -> bool:
        """By the clocks of this machine and of the API server: no other memory of the deletion survives a restart."""
        limit = to_ms(pool.spec.cleanup_timeout) / 1000 if pool else DEFAULT_CLEANUP_S
        since = datetime.fromisoformat(str(meta.deletion_timestamp))
        return (self._now() - since).total_seconds() > limit

    async def _tell(
        self,
        meta: Metadata,
        pool: KVCachePool | None,
        problem: str,
        observed: Snapshot,
        progress: ReconcileOutcome,
        pool_id: str,
    ) -> Manifest:
        now = self._stamp()
        if pool is None:
            status = invalid_status(meta, observed, problem, now)
        else:
            status = make_status(pool, observed, progress, pool_id, now)
        key = f"{meta.namespace}/{meta.name}"
        if worth_writing(observed.status, status, self._clock() - self._written.get(key, float("-inf"))):
            made = await write_status(status, meta, self._cluster)
            self._written[key] = self._clock()
            if _nothing_else_is_new(made, observed.raw) and (status["phase"] == "Ready" or progress.applied):
                self._wrote(NamespacedName(meta.namespace, meta.name), str(made["metadata"].get("resourceVersion", "")))
        return status

    async def _tell_tenants(self, pool: KVCachePool, observed: Snapshot, secret: PoolSecret, config: str) -> None:
        reports = [s.report for s in observed.sidecars if s.report is not None]
        for one in observed.tenants:
            status = tenant_status(one, pool.spec, reports, config, secret.pool_secret, self._stamp())
            await self._tell_tenant(one.raw, status)

    async def _tell_tenant(self, raw: Manifest, status: Manifest) -> None:
        """Numbers may wait half a minute; everything else is told at once."""
        meta = raw["metadata"]
        key, old = f"tenant {meta['namespace']}/{meta['name']}", raw.get("status") or {}
        calm = {k: v for k, v in old.items() if k != "used"} == {k: v for k, v in status.items() if k != "used"}
        since = self._clock() - self._written.get(key, float("-inf"))
        if old != status and (not calm or since >= NUMBERS_EVERY_S):
            await write_tenant_status(status, raw, self._cluster)
            self._written[key] = self._clock()

    def _stamp(self) -> str:
        return rfc3339(self._now())


def _read(raw: Manifest) -> tuple[Metadata, KVCachePool | None, str]:
    try:
        pool = KVCachePool.parse(raw)
        return pool.metadata, pool, ""
    except InvalidPoolError as e:
        return Metadata.model_validate(raw["metadata"]), None, str(e)


def _nothing_else_is_new(made: Manifest, seen: Manifest) -> bool:
    """Whether a pool whose status was written is as it was read, but for that. What decides is in `spec`, in the
    metadata, and in the verdict of the preflight."""
    told = ("uid", "generation", "labels", "annotations", "finalizers", "ownerReferences", "deletionTimestamp")
    verdicts = [(m.get("status") or {}).get("preflight") for m in (made, seen)]
    same = all(made["metadata"].get(k) == seen["metadata"].get(k) for k in told)
    return same and made.get("spec") == seen.get("spec") and verdicts[0] == verdicts[1]


def _shown(inputs: Inputs, observed: Snapshot) -> Inputs:
    """For `mode: DryRun`: values that are not made yet must not look different at each look."""
    if observed.object("Secret", names.secret(inputs.pool.metadata.name)) is not None:
        return inputs
    unmade = replace(inputs.secret, pool_secret="0" * 64, managed_index_password="", peer_files={})
    return replace(inputs, secret=unmade)


def _policy(raw: Manifest) -> str:
    """Also of a spec that cannot be understood; then nothing is destroyed unless it plainly says so."""
    spec = raw.get("spec")
    return "Delete" if isinstance(spec, dict) and spec.get("deletionPolicy") == "Delete" else "Retain"


def _inputs(
    pool: KVCachePool,
    env: InstallationConfig,
    secret: PoolSecret,
    observed: Snapshot,
    tenants: tuple[TenantConfig, ...],
) -> Inputs:
    sidecars = observed.object("DaemonSet", names.sidecar(pool.metadata.name)) or {}
    index = observed.object("StatefulSet", names.index(pool.metadata.name))
    return Inputs(
        pool,
        env,
        secret,
        observed.allowed_namespaces,
        observed.external,
        tenants,
        nodes=int((sidecars.get("status") or {}).get("desiredNumberScheduled", 0)),
        index_memory=memory_of(index),
        drives=observed.drives,
        resync_token=observed.stalled_rollover,
    )


def _secret(meta: Metadata, pool: KVCachePool | None, observed: Snapshot, now: datetime) -> PoolSecret:
    """The pool's random values: those in its Secret, and new ones only for what is not there or is to be changed."""
    known = str(observed.status.get("poolID") or "")
    live = observed.object("Secret", names.secret(meta.name))
    fresh = make_secret(known)
    secret = read_secret(live or {}, fresh)
    secret = replace(secret, peer_files=peer_files(secret.peer_files, now))
    if pool is None:
        return secret
    if live is None:
        return replace(secret, managed_index_revision=requested_revision(pool))
    if pool.spec.mode != "Enforce":
        return secret
    return rotate_password(pool, secret, fresh.managed_index_password, observed.sidecars)
