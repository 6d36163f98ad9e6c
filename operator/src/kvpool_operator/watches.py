"""Events of the cluster -> keys in the queue. The only module that imports kopf, which lists, watches and reconnects.

kopf's own handlers of changes are not used: they keep state in annotations and can miss a change. Watches of what a
pool is made of carry a server-side label selector, so that only this operator's objects cross the wire. Nodes are
watched for cordons and taints; they change seldom, for kubelets say that they are alive by Leases. Pods are not
watched: sidecars show in their DaemonSet's status, and engine pods are counted by the refresh.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final, Protocol

import kopf

from kvpool_operator.api.annotations import LABEL_POOL, LABEL_POOL_NAMESPACE
from kvpool_operator.api.operation import PLURAL as OPERATIONS
from kvpool_operator.api.tenant import TENANT_PLURAL
from kvpool_operator.api.v1alpha1 import GROUP, PLURAL, VERSION
from kvpool_operator.desired.labels import MANAGED_BY_SELECTOR
from kvpool_operator.k8s.client import KINDS, NamespacedName
from kvpool_operator.observe.observer import WATCHED_KINDS

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from kvpool_operator.k8s.namespace_cache import Namespaces
    from kvpool_operator.nodes.node_cache import NodeCache

__all__ = ["EventSink", "run"]

WATCH_IDLE_TIMEOUT_S: Final = 70.0
_OWNED: Final = tuple((KINDS[k].api_version.rpartition("/")[0], KINDS[k].plural) for k in WATCHED_KINDS)


class EventSink(Protocol):
    """Receives watch events. Calls come from the event loop of the watches and must not block."""

    def enqueue(self, namespace: str, name: str) -> None:
        """A pool changed."""

    def enqueue_debounced(self, namespace: str, name: str) -> None:
        """An object of a pool changed."""

    def enqueue_background(self, namespace: str, name: str) -> None:
        """A pool or an object of it was listed, when a watch began or began anew."""

    def enqueue_all(self) -> None:
        """Something changed that may concern any pool."""

    def observe_event(self, pool: NamespacedName, version: str) -> bool:
        """The watch has told of this version of a pool. False: it is known, for this operator wrote it."""


async def run(
    hears: EventSink,
    nodes: NodeCache,
    namespaces: Namespaces,
    stop: asyncio.Event,
    ready: asyncio.Event,
    *,
    operation_changed: Callable[[str, str], None] = lambda _namespace, _name: None,
    silence_s: float = WATCH_IDLE_TIMEOUT_S,
) -> None:
    """Run until `stop` is set or the process is told to end by a signal.

    `operation_changed(namespace, operation)` is called from this event loop and must not block, as all of `hears`.
    A stream that was silent for `silence_s` is taken for dead and opened again: API servers send a bookmark every
    minute. `nodes` and `namespaces` are kept up to date; a node that is to leave, or is not any more, concerns the
    pools that have a sidecar there.
    """
    registry = kopf.OperatorRegistry()

    def login(settings: kopf.OperatorSettings, **kwargs: Any) -> kopf.ConnectionInfo | None:
        if os.environ.get("KUBERNETES_SERVICE_HOST"):
            return kopf.login_with_service_account(settings=settings, **kwargs)
        return kopf.login_with_kubeconfig(settings=settings, **kwargs)

    async def pool(
        namespace: str | None,
        name: str | None,
        meta: Any,
        status: Any,
        type: str | None,  # noqa: A002
        **_: Any,
    ) -> None:
        key = NamespacedName(namespace or "", name or "")
        if not hears.observe_event(key, str(meta.get("resourceVersion", ""))):
            return
        # what was changed while nobody listened is waited for as well
        is_known = type is None and status.get("observedGeneration") == meta.get("generation")
        (hears.enqueue_background if is_known else hears.enqueue)(*key)

    async def operation(namespace: str | None, name: str | None, **_: Any) -> None:
        operation_changed(namespace or "", name or "")

    async def tenant(namespace: str | None, spec: Any, type: str | None, **_: Any) -> None:  # noqa: A002
        name = (spec.get("poolRef") or {}).get("name")
        if name:
            (hears.enqueue if type is not None else hears.enqueue_background)(namespace or "", str(name))

    async def owned(namespace: str | None, labels: Any, type: str | None, **_: Any) -> None:  # noqa: A002
        if LABEL_POOL in labels:
            tell = hears.enqueue_debounced if type is not None else hears.enqueue_background
            tell(namespace or labels.get(LABEL_POOL_NAMESPACE, ""), labels[LABEL_POOL])

    async def namespace_changed(type: str | None, name: str | None, labels: Any, meta: Any, **_: Any) -> None:  # noqa: A002
        if namespaces.changed(type, name or "", labels, "deletionTimestamp" in meta):
            hears.enqueue_all()

    async def node_changed(type: str | None, name: str | None, body: Any, **_: Any) -> None:  # noqa: A002
        before = nodes.get(name or "")
        if type == "DELETED":
            nodes.remove(name or "")
        elif nodes.upsert(name or "", dict(body)) == before:
            return
        for namespace, pool_name in nodes.pools_on(name or ""):
            hears.enqueue(namespace, pool_name)

    kopf.on.login(registry=registry)(login)
    kopf.on.event(GROUP, VERSION, PLURAL, registry=registry)(pool)
    kopf.on.event(GROUP, VERSION, OPERATIONS, registry=registry)(operation)
    kopf.on.event(GROUP, VERSION, TENANT_PLURAL, registry=registry)(tenant)
    kopf.on.event("", "v1", "namespaces", registry=registry)(namespace_changed)
    kopf.on.event("", "v1", "nodes", registry=registry)(node_changed)
    for group, plural in _OWNED:
        kopf.on.event(group, "v1", plural, registry=registry)(owned)

    await kopf.operator(
        registry=registry,
        settings=_settings(silence_s),
        standalone=True,
        clusterwide=True,
        stop_flag=stop,
        ready_flag=ready,
    )


def _settings(silence_s: float) -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.scanning.disabled = True  # needs no right to list CRDs; the process waits for its own before this
    settings.watching.server_timeout = 300
    settings.watching.connect_timeout = 10
    settings.watching.inactivity_timeout = silence_s
    settings.networking.request_timeout = 20
    # kopf keeps a worker for each object for this long after its last event: a bound on their number would make the
    # events of many pools wait for each other
    settings.queueing.worker_limit = None
    settings.queueing.idle_timeout = 1.0
    settings.process.ultimate_exiting_timeout = 10
    for _, plural in _OWNED:
        settings.watching.label_selectors[plural] = MANAGED_BY_SELECTOR
    return settings
