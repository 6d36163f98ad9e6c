"""ServiceAccounts of a pool, and the right of its sidecars to list and watch the pods of their node.

No token is mounted by default; only the rendezvous container gets one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpool_operator.desired import names
from kvpool_operator.desired.labels import cluster_scoped_metadata, metadata

if TYPE_CHECKING:
    from kvpool_operator.api.v1alpha1 import KVCachePool
    from kvpool_operator.desired.inputs import InstallationConfig, Manifest

__all__ = ["cluster_binding", "index_account", "sidecar_account"]


def cluster_binding(pool: KVCachePool, env: InstallationConfig) -> Manifest:
    """Bind the rendezvous role in all namespaces, where engine pods run. The operator can bind no other ClusterRole."""
    ns, name = pool.metadata.namespace, pool.metadata.name
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "metadata": cluster_scoped_metadata(pool, names.cluster_binding(ns, name), "sidecar"),
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": env.rendezvous_role},
        "subjects": [{"kind": "ServiceAccount", "name": names.sidecar(name), "namespace": ns}],
    }


def sidecar_account(pool: KVCachePool) -> Manifest:
    return _account(pool, names.sidecar(pool.metadata.name), "sidecar")


def index_account(pool: KVCachePool) -> Manifest | None:
    """Return None for an external index."""
    return None if pool.spec.index.external else _account(pool, names.index(pool.metadata.name), "index")


def _account(pool: KVCachePool, name: str, component: str) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": metadata(pool, name, component),
        "automountServiceAccountToken": False,
    }
