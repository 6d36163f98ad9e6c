"""Reflectors of everything but the operator's own kinds: owned objects, namespaces, nodes and pods.

Label selectors keep other objects off the wire, and projections keep unused fields out of memory. Pods cause no
reconcile: sidecars show in their DaemonSet's status, and engine pods are counted by the resync.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Protocol

from kvpool_operator.api.annotations import LABEL_POOL, LABEL_POOL_NAMESPACE
from kvpool_operator.desired.labels import COMPONENT, MANAGED_BY_SELECTOR
from kvpool_operator.k8s.client import KINDS
from kvpool_operator.k8s.pods import is_staying
from kvpool_operator.k8s.reflector import NamespacedStores, Reflector, Selection, without_managed_fields
from kvpool_operator.nodes.drain import drain_signal
from kvpool_operator.nodes.node_cache import NodeCache, slim_node
from kvpool_operator.observe.engine_pods import OPTED_IN, slim_engine_pod
from kvpool_operator.observe.observer import OWNED_KINDS, Listers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpool_operator.k8s.client import ListWatcher, Manifest
    from kvpool_operator.k8s.reflector import Event, Lister

__all__ = ["Informers", "PoolQueue"]

_POD_FIELDS: Final = ("nodeName", "affinity", "volumes")
_CONTAINER_FIELDS: Final = ("name", "securityContext")  # desired.rollout compares the users of sidecars


class PoolQueue(Protocol):
    """Queue of pools to reconcile. The calls must not block."""

    def enqueue(self, namespace: str, name: str) -> None:
        """Reconcile the pool now."""

    def enqueue_debounced(self, namespace: str, name: str) -> None:
        """Reconcile the pool soon, once for all objects of it that change together."""

    def enqueue_background(self, namespace: str, name: str) -> None:
        """Reconcile the pool when no other work waits."""

    def enqueue_all(self) -> None:
        """Reconcile every pool soon."""


class Informers:
    """All reflectors of the process. For one event loop."""

    def __init__(
        self, source: ListWatcher, *, idle_timeout_s: float, nfs: bool = True, namespaces: Sequence[str] = ()
    ) -> None:
        """`nfs`: whether PersistentVolumes are watched, which needs a right of its own.

        `namespaces`: the only ones in which namespaced objects are watched; empty: all.
        """
        self._pools: PoolQueue | None = None
        self._reflectors: list[Reflector] = []

        def reflect(selection: Selection, **options: Any) -> Lister:
            scopes = namespaces if namespaces and KINDS[selection.kind].namespaced else ("",)
            made = {
                scope: Reflector(source, replace(selection, namespace=scope), idle_timeout_s=idle_timeout_s, **options)
                for scope in scopes
            }
            self._reflectors += made.values()
            stores = {scope: reflector.store for scope, reflector in made.items()}
            return stores[""] if "" in stores else NamespacedStores(stores)

        pods = Selection("Pod", f"{LABEL_POOL},{COMPONENT} in (sidecar,preflight)", index_label=LABEL_POOL)
        all_namespaces = reflect(Selection("Namespace", metadata_only=True), on_event=self._on_namespace)
        nodes = reflect(Selection("Node"), project=slim_node, on_event=self._on_node)
        engine_pods = reflect(Selection("Pod", OPTED_IN), project=slim_engine_pod)
        pool_pods = reflect(pods, project=slim_pool_pod)
        owned = {
            kind: reflect(Selection(kind, MANAGED_BY_SELECTOR, index_label=LABEL_POOL), on_event=self._on_owned)
            for kind in OWNED_KINDS
            if nfs or kind != "PersistentVolume"
        }
        self.nodes = NodeCache(nodes)
        self.listers = Listers(namespaces=all_namespaces, engine_pods=engine_pods, pool_pods=pool_pods, owned=owned)

    async def run(self, pools: PoolQueue) -> None:
        """Keep all stores up to date until cancelled; changes enqueue the `pools` that they concern."""
        self._pools = pools
        async with asyncio.TaskGroup() as group:
            for reflector in self._reflectors:
                group.create_task(reflector.run())

    async def wait_synced(self) -> None:
        """Wait for the first complete list of every kind: before that, existing objects look missing."""
        for reflector in self._reflectors:
            await reflector.store.synced.wait()

    def _on_owned(self, event: Event) -> None:
        metadata = (event.new or event.old or {})["metadata"]
        labels = metadata.get("labels") or {}
        if LABEL_POOL in labels and self._pools is not None:
            enqueue = self._pools.enqueue_background if event.is_initial else self._pools.enqueue_debounced
            enqueue(metadata.get("namespace") or labels.get(LABEL_POOL_NAMESPACE, ""), labels[LABEL_POOL])

    def _on_namespace(self, event: Event) -> None:
        """Labels and deletion decide whose pods a pool serves."""
        changed = _namespace_state(event.old) != _namespace_state(event.new)
        if changed and not event.is_initial and self._pools is not None:
            self._pools.enqueue_all()

    def _on_node(self, event: Event) -> None:
        old, new = (drain_signal(m) if m is not None else None for m in (event.old, event.new))
        if old != new and self._pools is not None:
            for pool in self.nodes.pools_on((event.new or event.old or {})["metadata"]["name"]):
                self._pools.enqueue(pool.namespace, pool.name)


def slim_pool_pod(pod: Manifest) -> Manifest:
    """The part of a sidecar's or a preflight run's pod that is observed."""
    spec = pod.get("spec") or {}
    kept = {k: spec[k] for k in _POD_FIELDS if k in spec}
    kept["containers"] = [{k: c[k] for k in _CONTAINER_FIELDS if k in c} for c in spec.get("containers") or []]
    return {**without_managed_fields(pod), "spec": kept}


def _namespace_state(namespace: Manifest | None) -> tuple[bool, Any]:
    if namespace is None or not is_staying(namespace):
        return False, namespace is None
    return True, namespace["metadata"].get("labels") or {}
