"""Observes the cluster: reads everything that the reconcile of one pool needs into a Snapshot."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from kvpool_operator.api.annotations import LABEL_POOL, LABEL_POOL_NAMESPACE
from kvpool_operator.api.tenant import TENANT_KIND
from kvpool_operator.desired import labels, names
from kvpool_operator.desired.rollout import local_drives, max_surge
from kvpool_operator.errors import RejectedError
from kvpool_operator.injection.revision import revisions
from kvpool_operator.k8s import pods as podview
from kvpool_operator.k8s.client import ObjectRef, ref
from kvpool_operator.k8s.selectors import matches
from kvpool_operator.observe.active_sidecar import active_sidecars, stalled_rollover
from kvpool_operator.observe.engine_connections import find_connections
from kvpool_operator.observe.engine_pods import count
from kvpool_operator.observe.external_index import ExternalIndexLookup, read_external, secret_names
from kvpool_operator.observe.preflight import observe_preflight
from kvpool_operator.observe.sidecar_poll import poll_sidecars
from kvpool_operator.observe.snapshot import Snapshot, Webhook
from kvpool_operator.tenants.resolver import resolve, uses_selectors

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvpool_operator.api.v1alpha1 import KVCachePool, Metadata
    from kvpool_operator.k8s.client import ApiClient, Manifest
    from kvpool_operator.k8s.reflector import Lister
    from kvpool_operator.observe.engine_pods import EnginePods
    from kvpool_operator.sidecars.status_client import StatusClient

__all__ = ["Listers", "Observer", "ObserverConfig"]

NAMESPACED_KINDS: Final = (
    "ConfigMap",
    "DaemonSet",
    "NetworkPolicy",
    "PersistentVolumeClaim",
    "Service",
    "ServiceAccount",
    "StatefulSet",
)
CLUSTER_SCOPED_KINDS: Final = ("PersistentVolume",)
OWNED_KINDS: Final = NAMESPACED_KINDS + CLUSTER_SCOPED_KINDS
"""Kinds of a pool's objects; but for Secrets, which the operator may not list."""
WEBHOOK_TTL_S: Final = 5.0


@dataclass(frozen=True)
class Listers:
    """Watched objects that observations are made from."""

    namespaces: Lister
    engine_pods: Lister
    """Pods of any namespace that opted in."""
    pool_pods: Lister
    """Pods of sidecars and of preflight runs, by pool."""
    owned: Mapping[str, Lister]
    """Objects that this operator created, by kind (`OWNED_KINDS`)."""


@dataclass(frozen=True)
class ObserverConfig:
    """Settings of the installation."""

    sidecar_image: str
    namespace: str
    webhook: str
    """Name of the webhook's configuration and Deployment; empty if the API server itself injects."""


class Observer:
    """Reads for all pools; the state of the webhook, which is the same for all, once in some seconds."""

    def __init__(
        self,
        cluster: ApiClient,
        scraper: StatusClient,
        listers: Listers,
        config: ObserverConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cluster = cluster
        self._scraper = scraper
        self._listers = listers
        self._config = config
        self._clock = clock
        self._webhook: tuple[float, asyncio.Future[Webhook]] | None = None

    async def observe(self, raw: Manifest, meta: Metadata, pool: KVCachePool | None) -> Snapshot:
        """The snapshot of one pool. `pool` is None if its spec is invalid: then only its objects are read."""
        objects, terminating = await asyncio.gather(self._objects(meta), self._terminating(meta.namespace))
        if pool is None:
            return Snapshot(raw=raw, objects=objects, namespace_terminating=terminating)
        daemonset = objects.get(ObjectRef("DaemonSet", meta.namespace, names.sidecar(meta.name)))
        preflight = objects.get(ObjectRef("DaemonSet", meta.namespace, names.preflight(meta.name)))
        external, tenants, webhook, rejected, preflight_run = await asyncio.gather(
            self._external(pool),
            self.tenants_of(meta.namespace, meta.name),
            self._webhook_state(),
            self._rejection(meta, daemonset or preflight),
            observe_preflight(self._cluster, self._scraper, self._listers.pool_pods, pool, preflight),
        )
        allowed, pods = self._allowed(pool), self._pods(pool)
        sidecars = active_sidecars(pods, await poll_sidecars(self._scraper, [p for p in pods if podview.is_staying(p)]))
        engines = self._engine_pods(pool)
        rejection, is_missing, rejected_at = rejected
        newest = max((str(p["metadata"].get("creationTimestamp") or "") for p in pods), default="")
        return Snapshot(
            raw=raw,
            objects=objects,
            allowed_namespaces=allowed,
            tenants=resolve(tenants, self._namespaces(tenants), allowed),
            external=external.url,
            external_problem=external.problem,
            namespace_terminating=terminating,
            sidecars=sidecars,
            engines=engines,
            connections=find_connections(engines.pods, {s.node: s.report for s in sidecars}, datetime.now(UTC)),
            webhook=webhook,
            rejection=rejection if is_missing else "",
            # a pod that was created later shows that the rejection is over
            successor_rejection=rejection if not is_missing and rejected_at > newest else "",
            preflight_run=preflight_run,
            drives=local_drives(pods),
            stalled_rollover=stalled_rollover(pods, pool.spec.nodes.update.min_ready_seconds, datetime.now(UTC)),
        )

    async def _objects(self, meta: Metadata) -> dict[ObjectRef, Manifest]:
        """By label; the Secrets by name, because the operator may not list Secrets."""
        # an object that is overlooked while its pool is deleted stays forever: then the API is listed
        read = self._listed if meta.deletion_timestamp is not None else self._watched
        secrets, owned = await asyncio.gather(
            self._secrets(
                meta,
                names.secret(meta.name),
                names.events(meta.name),
                names.hints(meta.name),
                names.preflight(meta.name),
            ),
            read(meta),
        )
        return {ref(o): o for o in [*secrets, *owned]}

    async def _watched(self, meta: Metadata) -> list[Manifest]:
        owned = self._listers.owned
        mine = {LABEL_POOL: meta.name}
        wide = {**mine, LABEL_POOL_NAMESPACE: meta.namespace}
        namespaced = [o for kind in NAMESPACED_KINDS for o in owned[kind].list(meta.namespace, mine)]
        return namespaced + [o for kind in self._wide_kinds() for o in owned[kind].list("", wide)]

    async def _listed(self, meta: Metadata) -> list[Manifest]:
        mine = labels.pool_selector(meta.name)
        wide = f"{mine},{LABEL_POOL_NAMESPACE}={meta.namespace}"
        lists = await asyncio.gather(
            *(self._cluster.list(k, namespace=meta.namespace, labels=mine, fresh=True) for k in NAMESPACED_KINDS),
            *(self._cluster.list(k, labels=wide, fresh=True) for k in self._wide_kinds()),
        )
        return [o for objects in lists for o in objects]

    def _wide_kinds(self) -> list[str]:
        """Cluster-scoped kinds that the operator may have."""
        return [kind for kind in CLUSTER_SCOPED_KINDS if kind in self._listers.owned]

    async def _secrets(self, meta: Metadata, *wanted: str) -> list[Manifest]:
        found = await asyncio.gather(*(self._cluster.get(ObjectRef("Secret", meta.namespace, name)) for name in wanted))
        ours = (s for s in found if s is not None and labels.is_ours(s, meta.name))
        return [{"apiVersion": "v1", "kind": "Secret"} | secret for secret in ours]

    async def _terminating(self, namespace: str) -> bool:
        """Only the API decides that a namespace does not exist: the watch may not have delivered a new one yet."""
        found = self._listers.namespaces.get("", namespace)
        if found is None:
            found = await self._cluster.get(ObjectRef("Namespace", "", namespace))
        return found is None or not podview.is_staying(found)

    async def _external(self, pool: KVCachePool) -> ExternalIndexLookup:
        external = pool.spec.index.external
        if external is None:
            return ExternalIndexLookup()
        wanted = sorted(secret_names(external))
        secrets = await asyncio.gather(
            *(self._cluster.get(ObjectRef("Secret", pool.metadata.namespace, name)) for name in wanted)
        )
        return read_external(external, dict(zip(wanted, secrets, strict=True)))

    def _allowed(self, pool: KVCachePool) -> tuple[str, ...]:
        """Names of the namespaces whose pods are served; the pool's own always is."""
        allowed = pool.spec.injection.allowed_namespaces
        if allowed.from_ == "All":
            return ("*",)
        admitted = {pool.metadata.namespace}
        if allowed.selector is not None:
            selector = allowed.selector.model_dump(by_alias=True)
            admitted |= {name for name, found in self._living_namespaces().items() if matches(selector, found)}
        return tuple(sorted(admitted))

    def _living_namespaces(self) -> dict[str, Mapping[str, str]]:
        """Labels of the namespaces that are not being deleted."""
        living = [n["metadata"] for n in self._listers.namespaces.list() if podview.is_staying(n)]
        return {meta["name"]: meta.get("labels") or {} for meta in living}

    async def tenants_of(self, namespace: str, pool: str) -> list[Manifest]:
        """KVCacheTenants that name the pool; none if the cluster does not have the CRD."""
        try:
            found = await self._cluster.list(TENANT_KIND, namespace=namespace)
        except RejectedError as e:
            if e.status == 404:
                return []
            raise
        return [raw for raw in found if ((raw.get("spec") or {}).get("poolRef") or {}).get("name") == pool]

    def _namespaces(self, tenants: Sequence[Manifest]) -> Mapping[str, Mapping[str, str]]:
        """Labels of all namespaces, if a tenant selects by them."""
        return self._living_namespaces() if uses_selectors(tenants) else {}

    def _engine_pods(self, pool: KVCachePool) -> EnginePods:
        meta, pods = pool.metadata, self._listers.engine_pods.list()
        return count(pods, meta.namespace, meta.name, self._config.sidecar_image, revisions(pool))

    def _pods(self, pool: KVCachePool) -> list[Manifest]:
        """Pods of its sidecars, also those that are being deleted."""
        return self._listers.pool_pods.list(pool.metadata.namespace, labels.selector(pool, "sidecar"))

    async def _rejection(self, meta: Metadata, daemonset: Manifest | None) -> tuple[str, bool, str]:
        """Why the API server rejects pods of the DaemonSet (Pod Security, quota): such pods show in an Event only.

        Returns its message, whether nodes have no pod at all, and the Event's last time.
        """
        status = (daemonset or {}).get("status") or {}
        desired = status.get("desiredNumberScheduled", 0)
        is_missing = status.get("currentNumberScheduled", 0) < desired
        overlaps = max_surge(daemonset or {}) and status.get("updatedNumberScheduled", 0) < desired
        if daemonset is None or not (is_missing or overlaps):
            return "", False, ""
        about = f"involvedObject.name={daemonset['metadata']['name']},involvedObject.kind=DaemonSet,reason=FailedCreate"
        events = await self._cluster.list("Event", namespace=meta.namespace, fields=about)
        events = [e for e in events if e.get("involvedObject", {}).get("uid") == daemonset["metadata"].get("uid")]
        newest = max(events, key=lambda e: str(e.get("lastTimestamp") or ""), default={})
        return str(newest.get("message", ""))[:500], is_missing, str(newest.get("lastTimestamp") or "")

    async def _read_webhook(self) -> Webhook:
        if not self._config.webhook:
            return Webhook()  # a MutatingAdmissionPolicy injects
        try:
            configuration = await self._cluster.get(ObjectRef("MutatingWebhookConfiguration", "", self._config.webhook))
            deployment = await self._cluster.get(ObjectRef("Deployment", self._config.namespace, self._config.webhook))
        except RejectedError:
            return Webhook()  # without the right to read it, no problem is known
        if configuration is None:
            return Webhook("the webhook is not installed")
        hooks = configuration.get("webhooks") or [{}]
        if not all((h.get("clientConfig") or {}).get("caBundle") for h in hooks):
            return Webhook("the webhook has no certificate yet")
        if deployment is not None and not (deployment.get("status") or {}).get("availableReplicas"):
            return Webhook("no replica of the webhook is ready")
        return Webhook()

    async def _webhook_state(self) -> Webhook:
        """One read for all pools within `WEBHOOK_TTL_S`, also while it is in progress."""
        at, future = self._webhook or (float("-inf"), None)
        failed = future is not None and future.done() and (future.cancelled() or future.exception() is not None)
        if future is None or failed or self._clock() - at > WEBHOOK_TTL_S:
            future = asyncio.ensure_future(self._read_webhook())
            self._webhook = (self._clock(), future)
        return await asyncio.shield(future)
