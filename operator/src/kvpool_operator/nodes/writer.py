"""Writes KVCacheNodes: transitions immediately, counters twice a minute, all of them within one rate."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpool_operator.api.node import NODE_KIND
from kvpool_operator.k8s.client import ObjectRef
from kvpool_operator.k8s.status_writer import StatusParts, StatusWriter
from kvpool_operator.nodes.status import comparable_status, node_manifest, node_name, stable_part

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpool_operator.api.v1alpha1 import KVCachePool
    from kvpool_operator.k8s.client import ApiClient, Manifest, NamespacedName
    from kvpool_operator.k8s.rate_limiter import TokenBucket

__all__ = ["NodeWriter"]


class NodeWriter:
    """The only writer of KVCacheNodes. For one event loop."""

    def __init__(self, cluster: ApiClient, bucket: TokenBucket, clock: Callable[[], float]) -> None:
        self._cluster = cluster
        self._statuses = StatusWriter(cluster, StatusParts(stable_part, comparable_status), clock=clock, bucket=bucket)

    def record(self, pool: NamespacedName, node: str, status: Manifest) -> None:
        """Remember the status that the API holds."""
        self._statuses.record(_ref(pool, node), status)

    def invalidate(self, pool: NamespacedName, node: str) -> None:
        """The KVCacheNode was edited or deleted by somebody else: the next write recreates it."""
        self._statuses.invalidate(_ref(pool, node))

    def forget(self, pool: NamespacedName, node: str) -> None:
        """The KVCacheNode no longer matters, or was deleted with its pool."""
        self._statuses.forget(_ref(pool, node))

    async def write(self, pool: KVCachePool, node: str, status: Manifest) -> None:
        """Write the status if it is due; create the object first where there is none."""
        await self._statuses.write(node_manifest(pool, node), status, create=True)

    async def delete(self, pool: NamespacedName, node: str) -> None:
        """Delete the KVCacheNode of a node that left for good."""
        await self._cluster.delete(_ref(pool, node))
        self.forget(pool, node)


def _ref(pool: NamespacedName, node: str) -> ObjectRef:
    return ObjectRef(NODE_KIND, pool.namespace, node_name(pool.name, node))
