"""Labels and owner of a pool's objects."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from kvpool_operator.api.v1alpha1 import API_VERSION, KIND

if TYPE_CHECKING:
    from kvpool_operator.api.v1alpha1 import KVCachePool
    from kvpool_operator.desired.inputs import Manifest

__all__ = [
    "MANAGED_BY",
    "MANAGED_BY_SELECTOR",
    "NAMESPACE",
    "POOL",
    "RETAINED",
    "is_ours",
    "labels",
    "metadata",
    "pool_selector",
    "selector",
    "wide_metadata",
]

MANAGED_BY: Final = "kvpool-operator"
POOL: Final = "kvpool.dev/pool"
NAMESPACE: Final = "kvpool.dev/pool-namespace"
"""On cluster-scoped objects, which two pools of one name would share otherwise."""
MANAGED_BY_SELECTOR: Final = f"app.kubernetes.io/managed-by={MANAGED_BY}"
"""Label selector of every object that this operator creates."""
RETAINED: Final = "kvpool.dev/retained"
"""On what a deleted pool left behind on purpose."""


def labels(pool: str, component: str) -> dict[str, str]:
    """Labels of an object of the pool of that name."""
    return {
        "app.kubernetes.io/name": "kvpool",
        "app.kubernetes.io/instance": pool,
        "app.kubernetes.io/component": component,
        "app.kubernetes.io/managed-by": MANAGED_BY,
        POOL: pool,
    }


def pool_selector(pool: str) -> str:
    """Label selector of the objects of the pool of that name."""
    return f"{MANAGED_BY_SELECTOR},{POOL}={pool}"


def is_ours(manifest: Manifest, pool: str) -> bool:
    """Whether an object was made by this operator for a pool of that name."""
    found = (manifest.get("metadata") or {}).get("labels") or {}
    return found.get("app.kubernetes.io/managed-by") == MANAGED_BY and found.get(POOL) == pool


def selector(pool: KVCachePool, component: str) -> dict[str, str]:
    """What selects the pods of one component. It can never change, so it is as small as it can be."""
    return {POOL: pool.metadata.name, "app.kubernetes.io/component": component}


def metadata(pool: KVCachePool, name: str, component: str) -> dict[str, Any]:
    """Metadata of an object in the pool's namespace: it goes with the pool even if the operator is gone."""
    owner = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": pool.metadata.name,
        "uid": pool.metadata.uid,
        "controller": True,
        "blockOwnerDeletion": False,
    }
    return {
        "name": name,
        "namespace": pool.metadata.namespace,
        "labels": labels(pool.metadata.name, component),
        "ownerReferences": [owner],
    }


def wide_metadata(pool: KVCachePool, name: str, component: str) -> dict[str, Any]:
    """Metadata of a cluster-scoped object, which cannot have an owner in a namespace: the finalizer removes it."""
    return {"name": name, "labels": labels(pool.metadata.name, component) | {NAMESPACE: pool.metadata.namespace}}
