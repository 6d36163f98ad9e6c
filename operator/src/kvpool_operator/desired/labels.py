"""Labels and owner of a pool's objects."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from kvpool_operator.api.annotations import LABEL_POOL, LABEL_POOL_NAMESPACE
from kvpool_operator.api.v1alpha1 import API_VERSION, KIND

if TYPE_CHECKING:
    from kvpool_operator.api.v1alpha1 import KVCachePool
    from kvpool_operator.desired.inputs import Manifest

__all__ = [
    "COMPONENT",
    "MANAGED_BY",
    "MANAGED_BY_SELECTOR",
    "cluster_scoped_metadata",
    "is_ours",
    "labels",
    "metadata",
    "pool_selector",
    "selector",
]

MANAGED_BY: Final = "kvpool-operator"
COMPONENT: Final = "app.kubernetes.io/component"
MANAGED_BY_SELECTOR: Final = f"app.kubernetes.io/managed-by={MANAGED_BY}"
"""Label selector of every object that this operator creates."""


def labels(pool: str, component: str) -> dict[str, str]:
    """Labels of an object of the pool of that name."""
    return {
        "app.kubernetes.io/name": "kvpool",
        "app.kubernetes.io/instance": pool,
        COMPONENT: component,
        "app.kubernetes.io/managed-by": MANAGED_BY,
        LABEL_POOL: pool,
    }


def pool_selector(pool: str) -> str:
    """Label selector of the objects of the pool of that name."""
    return f"{MANAGED_BY_SELECTOR},{LABEL_POOL}={pool}"


def is_ours(manifest: Manifest, pool: str) -> bool:
    """Whether an object was made by this operator for a pool of that name."""
    found = (manifest.get("metadata") or {}).get("labels") or {}
    return found.get("app.kubernetes.io/managed-by") == MANAGED_BY and found.get(LABEL_POOL) == pool


def selector(pool: KVCachePool, component: str) -> dict[str, str]:
    """What selects the pods of one component. It can never change, so it is as small as it can be."""
    return {LABEL_POOL: pool.metadata.name, COMPONENT: component}


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


def cluster_scoped_metadata(pool: KVCachePool, name: str, component: str) -> dict[str, Any]:
    """Metadata of a cluster-scoped object. It has no owner reference, because an owner in a namespace is not allowed.

    The finalizer of the pool deletes it.
    """
    return {
        "name": name,
        "labels": labels(pool.metadata.name, component) | {LABEL_POOL_NAMESPACE: pool.metadata.namespace},
    }
