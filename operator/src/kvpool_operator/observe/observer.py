"""Reading the cluster: everything that a decision about one pool needs, in one frozen value."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from kvpool_operator.api.annotations import LABEL_POOL_NAMESPACE
from kvpool_operator.api.tenant import TENANT_KIND
from kvpool_operator.desired import labels, names
from kvpool_operator.desired.rollout import drives_of, surge_of
from kvpool_operator.errors import RejectedError
from kvpool_operator.injection.revision import revisions
from kvpool_operator.k8s import pods as podview
from kvpool_operator.k8s.client import NamespacedName, ObjectRef, ref
from kvpool_operator.k8s.namespace_cache import Namespaces
from kvpool_operator.observe.active_sidecar import active_sidecars, stalled_rollover
from kvpool_operator.observe.engine_pods import OPTED_IN, count
from kvpool_operator.observe.external_index import read_external, secret_names
from kvpool_operator.observe.preflight import observe_preflight
from kvpool_operator.observe.sidecar_poll import poll_sidecars
from kvpool_operator.observe.snapshot import Snapshot, Webhook
from kvpool_operator.runtime.ttl_cache import TTLCache
from kvpool_operator.tenants.resolver import resolve, uses_selectors

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from kvpool_operator.api.v1alpha1 import KVCachePool, Metadata
    from kvpool_operator.desired.inputs import ExternalIndexUrl
    from kvpool_operator.k8s.client import ApiClient, Manifest
    from kvpool_operator.sidecars.status_client import StatusClient

__all__ = ["Observer"]

WATCHED_KINDS: Final = ("ConfigMap", "DaemonSet", "Service", "StatefulSet")
"""Kinds of a pool's objects that `handlers` watches: what becomes of them shows at once."""
UNWATCHED_KINDS: Final = ("NetworkPolicy", "PersistentVolumeClaim", "ServiceAccount")
CLUSTER_SCOPED_KINDS: Final = ("ClusterRoleBinding", "PersistentVolume")
"""Kinds that nobody watches: they hardly ever change but by this operator (`still`)."""
OWNED_KINDS: Final = WATCHED_KINDS + UNWATCHED_KINDS
SHARED_VIEW_TTL_S: Final = 5.0


class Observer:
    """Reads for all pools; what is the same for all is read once in some seconds."""

    def __init__(
        self,
        cluster: ApiClient,
        scraper: StatusClient,
        *,
        sidecar_image: str,
        namespace: str,
        webhook: str,
        clock: Callable[[], float] = time.monotonic,
        namespaces: Namespaces | None = None,
        still_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`namespaces`: what a watch tells of them. `still_s`: see `TTLCache`."""
        self._cluster = cluster
        self._told_namespaces = namespaces or Namespaces()
        self._cache = TTLCache(still_s, clock)
        self._scraper = scraper
        self._image = sidecar_image
        self._namespace = namespace
        self._webhook = webhook
        self._clock = clock
        self._views: dict[str, tuple[float, asyncio.Future[Any]]] = {}

    async def observe(self, raw: Manifest, meta: Metadata, pool: KVCachePool | None) -> Snapshot:
        """Everything about one pool. `pool` is None when its spec cannot be understood: then only its objects count."""
        objects, terminating = await asyncio.gather(self._objects(meta), self._terminating(meta.namespace))
        if pool is None:
            return Snapshot(raw=raw, objects=objects, namespace_terminating=terminating)
        daemonset = objects.get(ObjectRef("DaemonSet", meta.namespace, names.sidecar(meta.name)))
        look = objects.get(ObjectRef("DaemonSet", meta.namespace, names.preflight(meta.name)))
        external, allowed, tenants, pods, engine_pods, webhook, refused, looks = await asyncio.gather(
            self._external(pool),
            self._allowed(pool),
            self.tenants_of(meta.namespace, meta.name),
            self._pods(pool),
            self._shared("engines", lambda: self._cluster.list("Pod", labels=OPTED_IN)),
            self._shared("webhook", self._webhook_view),
            self._refusal(meta, daemonset or look),
            observe_preflight(self._cluster, self._scraper, pool, look),
        )
        sidecars = active_sidecars(pods, await poll_sidecars(self._scraper, [p for p in pods if podview.is_staying(p)]))
        refusal, is_missing, refused_at = refused
        newest = max((str(p["metadata"].get("creationTimestamp") or "") for p in pods), default="")
        return Snapshot(
            raw=raw,
            objects=objects,
            allowed_namespaces=allowed,
            tenants=resolve(tenants, await self._namespaces(tenants), allowed),
            external=None if isinstance(external, str) else external,
            external_problem=external if isinstance(external, str) else "",
            namespace_terminating=terminating,
            sidecars=sidecars,
            engines=count(engine_pods, meta.namespace, meta.name, self._image, revisions(pool)),
            webhook=webhook,
            refusal=refusal if is_missing else "",
            # a pod that was made later shows that it was a former refusal
            successor_rejection=refusal if not is_missing and refused_at > newest else "",
            looks=looks,
            drives=drives_of(pods),
            stalled_rollover=stalled_rollover(pods, pool.spec.nodes.update.min_ready_seconds, datetime.now(UTC)),
        )

    def forget(self, namespace: str, name: str) -> None:
        """Objects of this pool are about to be written, or it is gone."""
        self._cache.forget(NamespacedName(namespace, name))

    async def _objects(self, meta: Metadata) -> dict[ObjectRef, Manifest]:
        """By label; the Secrets by name, for the operator may not list Secrets."""
        fresh = meta.deletion_timestamp is not None  # what is overlooked now is left behind for ever
        key = NamespacedName(meta.namespace, meta.name)
        still = self._cache.get(key, lambda: self._unwatched(meta, fresh=fresh), bypass=fresh)
        secret, unwatched, *lists = await asyncio.gather(
            self._secrets(meta, names.secret(meta.name)),
            still,
            *(self._owned(k, meta, fresh=fresh) for k in WATCHED_KINDS),
        )
        found = [*secret, *unwatched, *(o for objects in lists for o in objects)]
        return {ref(o): o for o in found}

    async def _unwatched(self, meta: Metadata, *, fresh: bool) -> list[Manifest]:
        wide = f"{labels.pool_selector(meta.name)},{LABEL_POOL_NAMESPACE}={meta.namespace}"
        secrets, *lists = await asyncio.gather(
            self._secrets(meta, names.events(meta.name), names.preflight(meta.name)),
            *(self._owned(k, meta, fresh=fresh) for k in UNWATCHED_KINDS),
            *(self._cluster.list(k, labels=wide, fresh=fresh) for k in CLUSTER_SCOPED_KINDS),
        )
        return [*secrets, *(o for objects in lists for o in objects)]

    async def _owned(self, kind: str, meta: Metadata, *, fresh: bool) -> list[Manifest]:
        return await self._cluster.list(
            kind, namespace=meta.namespace, labels=labels.pool_selector(meta.name), fresh=fresh
        )

    async def _secrets(self, meta: Metadata, *wanted: str) -> list[Manifest]:
        found = await asyncio.gather(*(self._cluster.get(ObjectRef("Secret", meta.namespace, name)) for name in wanted))
        ours = (s for s in found if s is not None and labels.is_ours(s, meta.name))
        return [{"apiVersion": "v1", "kind": "Secret"} | secret for secret in ours]

    async def _terminating(self, namespace: str) -> bool:
        going = self._told_namespaces.is_going(namespace)
        if going is not None:
            return going
        found = await self._cluster.get(ObjectRef("Namespace", "", namespace))
        return found is None or "deletionTimestamp" in found["metadata"]

    async def _external(self, pool: KVCachePool) -> ExternalIndexUrl | str | None:
        external = pool.spec.index.external
        if external is None:
            return None
        wanted = sorted(secret_names(external))
        found = await asyncio.gather(
            *(self._cluster.get(ObjectRef("Secret", pool.metadata.namespace, name)) for name in wanted)
        )
        return read_external(external, dict(zip(wanted, found, strict=True)))

    async def _allowed(self, pool: KVCachePool) -> tuple[str, ...]:
        """Names of the namespaces whose pods are served; the pool's own always is."""
        allowed = pool.spec.injection.allowed_namespaces
        if allowed.from_ == "All":
            return ("*",)
        found = {pool.metadata.namespace}
        if allowed.selector is not None:
            listed = await self._cluster.list("Namespace", labels=podview.selector_text(allowed.selector))
            found |= {n["metadata"]["name"] for n in listed if "deletionTimestamp" not in n["metadata"]}
        return tuple(sorted(found))

    async def tenants_of(self, namespace: str, pool: str) -> list[Manifest]:
        """The KVCacheTenants that name the pool; none where the cluster does not know the kind."""
        try:
            found = await self._cluster.list(TENANT_KIND, namespace=namespace)
        except RejectedError as e:
            if e.status == 404:
                return []
            raise
        return [raw for raw in found if ((raw.get("spec") or {}).get("poolRef") or {}).get("name") == pool]

    async def _namespaces(self, tenants: Sequence[Manifest]) -> dict[str, dict[str, str]]:
        """Labels of all namespaces, where a tenant chooses by them."""
        if not uses_selectors(tenants):
            return {}
        listed = await self._cluster.list("Namespace")
        living = [n["metadata"] for n in listed if "deletionTimestamp" not in n["metadata"]]
        return {meta["name"]: meta.get("labels") or {} for meta in living}

    async def _pods(self, pool: KVCachePool) -> list[Manifest]:
        """Of its sidecars, also those on their way out."""
        meta = pool.metadata
        wanted = ",".join(f"{k}={v}" for k, v in sorted(labels.selector(pool, "sidecar").items()))
        return await self._cluster.list("Pod", namespace=meta.namespace, labels=wanted)

    async def _refusal(self, meta: Metadata, daemonset: Manifest | None) -> tuple[str, bool, str]:
        """Pods that are refused (Pod Security, quota) never exist; only an Event says so.

        Its words, whether nodes are without any pod, and when it was told last.
        """
        status = (daemonset or {}).get("status") or {}
        desired = status.get("desiredNumberScheduled", 0)
        is_missing = status.get("currentNumberScheduled", 0) < desired
        overlaps = surge_of(daemonset or {}) and status.get("updatedNumberScheduled", 0) < desired
        if daemonset is None or not (is_missing or overlaps):
            return "", False, ""
        about = f"involvedObject.name={daemonset['metadata']['name']},involvedObject.kind=DaemonSet,reason=FailedCreate"
        events = await self._cluster.list("Event", namespace=meta.namespace, fields=about)
        events = [e for e in events if e.get("involvedObject", {}).get("uid") == daemonset["metadata"].get("uid")]
        newest = max(events, key=lambda e: str(e.get("lastTimestamp") or ""), default={})
        return str(newest.get("message", ""))[:500], is_missing, str(newest.get("lastTimestamp") or "")

    async def _webhook_view(self) -> Webhook:
        if not self._webhook:
            return Webhook()  # the API server itself injects
        try:
            configuration = await self._cluster.get(ObjectRef("MutatingWebhookConfiguration", "", self._webhook))
            deployment = await self._cluster.get(ObjectRef("Deployment", self._namespace, self._webhook))
        except RejectedError:
            return Webhook()  # not allowed to look: nothing is known to be wrong
        if configuration is None:
            return Webhook("the webhook is not installed")
        hooks = configuration.get("webhooks") or [{}]
        if not all((h.get("clientConfig") or {}).get("caBundle") for h in hooks):
            return Webhook("the webhook has no certificate yet")
        if deployment is not None and not (deployment.get("status") or {}).get("availableReplicas"):
            return Webhook("no replica of the webhook is ready")
        return Webhook()

    async def _shared(self, what: str, read: Callable[[], Awaitable[Any]]) -> Any:
        """One reading for all pools that ask within some seconds, also while it is under way."""
        at, future = self._views.get(what, (float("-inf"), None))
        failed = future is not None and future.done() and (future.cancelled() or future.exception() is not None)
        if future is None or failed or self._clock() - at > SHARED_VIEW_TTL_S:
            future = asyncio.ensure_future(read())
            self._views[what] = (self._clock(), future)
        return await asyncio.shield(future)
