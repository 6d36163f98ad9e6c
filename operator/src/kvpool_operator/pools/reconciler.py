"""Reconciles one KVCachePool: observe, plan, apply, report. The decisions are in the modules that it calls."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from kvpool_operator.api.duration import to_ms
from kvpool_operator.api.v1alpha1 import KIND, KVCachePool, Metadata
from kvpool_operator.desired import Inputs, build, names
from kvpool_operator.desired.dry_run import dry_run_configmap
from kvpool_operator.desired.index import current_index_memory
from kvpool_operator.desired.preflight import build_preflight, preflight_spec
from kvpool_operator.desired.wipe import build_cleanup
from kvpool_operator.errors import InvalidPoolError
from kvpool_operator.injection.revision import revisions
from kvpool_operator.k8s.client import NamespacedName, ObjectRef
from kvpool_operator.pki.authority_root import AuthorityRoot
from kvpool_operator.pools.apply import ApplyResult, apply_plan
from kvpool_operator.pools.conditions import ReconcileOutcome
from kvpool_operator.pools.plan import (
    Plan,
    plan,
    plan_cleanup,
    plan_dry_run,
    plan_during_preflight,
    summarize_changes,
)
from kvpool_operator.pools.pod_evictor import EvictionRound, PodEvictor
from kvpool_operator.pools.secrets import nodes_without_new_password, pool_secret
from kvpool_operator.pools.status import invalid_status, make_status
from kvpool_operator.pools.status_reporter import StatusReporter
from kvpool_operator.preflight.gate import PreflightResult
from kvpool_operator.runtime.reconciler import Result
from kvpool_operator.tenants.resolver import to_configs
from kvpool_operator.times import elapsed_s, rfc3339

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpool_operator.api.installation_limits import InstallationLimits
    from kvpool_operator.desired.inputs import InstallationConfig, PoolSecret
    from kvpool_operator.k8s.client import ApiClient, Manifest
    from kvpool_operator.nodes.reconciler import NodeReconciler
    from kvpool_operator.observe.observer import Observer
    from kvpool_operator.observe.snapshot import Snapshot
    from kvpool_operator.pools.config_push import ConfigPusher

__all__ = ["PoolDependencies", "PoolReconciler"]

log = logging.getLogger(__name__)

REQUEUE_S: Final = 1.0
DEFAULT_CLEANUP_TIMEOUT_S: Final = 300.0


def _ignore_own_write(_pool: NamespacedName, _version: str) -> None:
    pass


@dataclass(frozen=True)
class PoolDependencies:
    """What the reconciler of pools works with; the same for all pools."""

    cluster: ApiClient
    observer: Observer
    env: InstallationConfig
    nodes: NodeReconciler | None = None
    config_pusher: ConfigPusher | None = None
    root: AuthorityRoot = field(default_factory=AuthorityRoot.generate)
    """From which the keys of the pools' CAs are derived."""
    clock: Callable[[], float] = time.monotonic
    now: Callable[[], datetime] = lambda: datetime.now(UTC)
    record_own_write: Callable[[NamespacedName, str], None] = _ignore_own_write
    """Called with a version of a pool that differs from the one before by its status only, so needs no reconcile."""


class PoolReconciler:
    """Reconciles pools. For one event loop; each pool is reconciled by one task at a time."""

    def __init__(self, dependencies: PoolDependencies) -> None:
        self._cluster = dependencies.cluster
        self._observer = dependencies.observer
        self._env = dependencies.env
        self._root = dependencies.root
        self._nodes = dependencies.nodes
        self._config_pusher = dependencies.config_pusher
        self._now = dependencies.now
        self._evictor = PodEvictor(dependencies.cluster, clock=dependencies.clock)
        self._reporter = StatusReporter(dependencies.cluster, dependencies.clock, dependencies.record_own_write)

    async def reconcile(self, namespace: str, name: str) -> Result:
        """Bring one pool a step closer to its desired state. RetryableError: repeat it with backoff."""
        raw = await self._cluster.get(ObjectRef(KIND, namespace, name))
        if raw is None:
            await self._forget(NamespacedName(namespace, name))
            return Result(gone=True)
        meta, pool, problem = _parse(raw, self._env.limits)
        snapshot = await self._observer.observe(raw, meta, pool)
        secret = pool_secret(meta, pool, snapshot, self._root, self._now())
        inputs = _inputs(pool, self._env, secret, snapshot) if pool else None
        preflight = self._preflight(pool, inputs, snapshot)
        steps = self._plan(meta, pool, inputs, snapshot, preflight)
        applied = await apply_plan(steps, meta, self._cluster)
        if steps.done and not applied.rejections:
            return Result(gone=True)
        is_living = pool is not None and not meta.deletion_timestamp and not snapshot.namespace_terminating
        evictions = await self._evict(pool, snapshot) if pool is not None and is_living else EvictionRound()
        config_digest = inputs.config.digest if inputs else ""
        outcome = ReconcileOutcome(
            applied=len(applied.applied) + len(applied.pruned),
            waiting=steps.waiting,
            rejections=applied.rejections,
            eviction_problem=evictions.problem,
            preflight=preflight,
            config_digest=config_digest,
            without_new_password=(
                tuple(nodes_without_new_password(secret, snapshot.sidecars)) if secret.managed_index_previous else ()
            ),
        )
        pool_id = secret.pool_id if snapshot.objects or applied.applied else ""
        status = self._status(meta, pool, problem, snapshot, outcome, pool_id)
        is_progress = status["phase"] == "Ready" or bool(outcome.applied)
        await self._reporter.report_pool(meta, snapshot, status, is_progress=is_progress)
        if pool is not None:
            await self._reporter.report_tenants(pool, snapshot, config_digest, secret.pool_secret, self._stamp())
        pushed = is_living and await self._push_config(meta, snapshot, applied, secret, inputs)
        drain_requeue_s = None
        if self._nodes is not None and pool is not None and is_living and pool.spec.mode != "DryRun":
            drain_requeue_s = await self._nodes.reconcile(pool, snapshot, secret)
        return Result(
            requeue_after_s=REQUEUE_S if steps.waiting or outcome.applied or pushed else drain_requeue_s,
            status=status,
            restarts=evictions.outcomes,
        )

    async def _forget(self, pool: NamespacedName) -> None:
        """The pool no longer exists: drop what is remembered of it, and notify its tenants."""
        self._reporter.forget(pool)
        self._evictor.forget(str(pool))
        if self._nodes is not None:
            self._nodes.forget(pool.namespace, pool.name)
        if self._config_pusher is not None:
            self._config_pusher.forget(str(pool))
        tenants = await self._observer.tenants_of(pool.namespace, pool.name)
        await self._reporter.report_orphans(tenants, pool.name, self._stamp())

    async def _push_config(
        self, meta: Metadata, snapshot: Snapshot, applied: ApplyResult, secret: PoolSecret, inputs: Inputs | None
    ) -> bool:
        """Push the configuration to running sidecars, once the ConfigMap has it."""
        if self._config_pusher is None or inputs is None:
            return False
        target = ObjectRef("ConfigMap", meta.namespace, names.config(meta.name))
        live = (snapshot.objects.get(target) or {}).get("data") or {}
        if target not in applied.applied and live.get("pool.json") != inputs.config.text:
            return False
        return await self._config_pusher.push(
            f"{meta.namespace}/{meta.name}", snapshot, secret, inputs.config.text, inputs.config.digest
        )

    async def _evict(self, pool: KVCachePool, snapshot: Snapshot) -> EvictionRound:
        target = f"{self._env.sidecar_image} {sorted(revisions(pool).items())}"
        return await self._evictor.reconcile(pool, snapshot, target)

    def _preflight(self, pool: KVCachePool | None, inputs: Inputs | None, snapshot: Snapshot) -> PreflightResult:
        """Whether sidecars may be created or changed."""
        previous = snapshot.status.get("preflight")
        previous = previous if isinstance(previous, dict) else {}
        if pool is None or inputs is None:
            return PreflightResult.from_status("Warn", previous)
        policy, mode = pool.spec.preflight, pool.spec.mode
        if pool.metadata.deletion_timestamp or mode == "Paused" or snapshot.external_problem:
            return PreflightResult.from_status(policy, previous)
        return PreflightResult.evaluate(
            policy, preflight_spec(inputs), snapshot.preflight_run, previous, self._now(), dry_run=mode == "DryRun"
        )

    def _plan(
        self,
        meta: Metadata,
        pool: KVCachePool | None,
        inputs: Inputs | None,
        snapshot: Snapshot,
        preflight: PreflightResult,
    ) -> Plan:
        if meta.deletion_timestamp:
            return plan_cleanup(
                meta,
                _deletion_policy(snapshot.raw),
                build_cleanup(inputs) if inputs else None,
                snapshot,
                overdue=self._is_overdue(meta, pool),
            )
        if inputs is None or snapshot.namespace_terminating:
            return Plan()
        if inputs.pool.spec.mode == "Paused" or snapshot.external_problem:
            return Plan()
        checks = build_preflight(inputs) if preflight.is_running else None
        waiting = (
            f"the preflight checks of {preflight.unresponsive} of {preflight.nodes} nodes"
            if preflight.state == "Checking"
            else ""
        )
        if inputs.pool.spec.mode == "DryRun":
            wanted = build(_without_random_values(inputs, snapshot))
            preview = dry_run_configmap(inputs.pool, wanted, summarize_changes(meta, wanted, snapshot))
            return plan_dry_run(meta, preview, checks, snapshot, waiting)
        if checks is not None:
            return plan_during_preflight(meta, build(inputs), checks, snapshot, waiting)
        return plan(meta, build(inputs), snapshot)

    def _is_overdue(self, meta: Metadata, pool: KVCachePool | None) -> bool:
        """Whether the cleanup timeout has passed, by the deletion timestamp, which survives a restart."""
        limit_s = to_ms(pool.spec.cleanup_timeout) / 1000 if pool else DEFAULT_CLEANUP_TIMEOUT_S
        return elapsed_s(str(meta.deletion_timestamp), self._now()) > limit_s

    def _status(
        self,
        meta: Metadata,
        pool: KVCachePool | None,
        problem: str,
        snapshot: Snapshot,
        outcome: ReconcileOutcome,
        pool_id: str,
    ) -> Manifest:
        if pool is None:
            return invalid_status(meta, snapshot, problem, self._stamp())
        return make_status(pool, snapshot, outcome, pool_id, self._stamp())

    def _stamp(self) -> str:
        return rfc3339(self._now())


def _parse(raw: Manifest, limits: InstallationLimits) -> tuple[Metadata, KVCachePool | None, str]:
    """Metadata, the pool (None if its spec is invalid), and the problem of an invalid spec."""
    try:
        pool = KVCachePool.parse(raw)
        limits.check(pool)
        return pool.metadata, pool, ""
    except InvalidPoolError as e:
        return Metadata.model_validate(raw["metadata"]), None, str(e)


def _without_random_values(inputs: Inputs, snapshot: Snapshot) -> Inputs:
    """For `mode: DryRun` before the Secret exists: fixed values, so that the preview does not change each time."""
    if snapshot.object("Secret", names.secret(inputs.pool.metadata.name)) is not None:
        return inputs
    fixed = replace(inputs.secret, pool_secret="0" * 64, managed_index_password="", peer_files={}, index_files={})
    return replace(inputs, secret=fixed)


def _deletion_policy(raw: Manifest) -> str:
    """The policy, also of an invalid spec: Retain unless the spec clearly says Delete."""
    spec = raw.get("spec")
    return "Delete" if isinstance(spec, dict) and spec.get("deletionPolicy") == "Delete" else "Retain"


def _inputs(pool: KVCachePool, env: InstallationConfig, secret: PoolSecret, snapshot: Snapshot) -> Inputs:
    daemonset = snapshot.object("DaemonSet", names.sidecar(pool.metadata.name)) or {}
    index = snapshot.object("StatefulSet", names.index(pool.metadata.name))
    return Inputs(
        pool,
        env,
        secret,
        snapshot.allowed_namespaces,
        snapshot.external,
        to_configs(snapshot.tenants, pool.spec),
        nodes=int((daemonset.get("status") or {}).get("desiredNumberScheduled", 0)),
        index_memory=current_index_memory(index),
        drives=snapshot.drives,
        resync_token=snapshot.stalled_rollover,
    )
