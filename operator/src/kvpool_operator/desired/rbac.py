"""What the sidecars may ask the API server: to list and watch pods, so that each finds its own node's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpool_operator.desired import names
from kvpool_operator.desired.labels import cluster_scoped_metadata

if TYPE_CHECKING:
    from kvpool_operator.api.v1alpha1 import KVCachePool
    from kvpool_operator.desired.inputs import InstallationConfig, Manifest

__all__ = ["cluster_binding"]


def cluster_binding(pool: KVCachePool, env: InstallationConfig) -> Manifest:
    """Engine pods live in any namespace, so this is cluster-wide. The operator may bind this one ClusterRole only."""
    ns, name = pool.metadata.namespace, pool.metadata.name
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "metadata": cluster_scoped_metadata(pool, names.cluster_binding(ns, name), "sidecar"),
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": env.rendezvous_role},
        "subjects": [{"kind": "ServiceAccount", "name": names.sidecar(name), "namespace": ns}],
    }
