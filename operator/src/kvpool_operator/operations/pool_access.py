"""Reads what an operation needs of its pool: the pool, its secret, its tenants, and the sidecar of each node."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvpool_operator.api.tenant import TENANT_KIND
from kvpool_operator.api.v1alpha1 import KIND, KVCachePool
from kvpool_operator.desired import labels, names
from kvpool_operator.desired.secrets import read_secret
from kvpool_operator.errors import InvalidPoolError
from kvpool_operator.k8s import pods as podview
from kvpool_operator.k8s.client import ObjectRef
from kvpool_operator.observe.active_sidecar import active_sidecars
from kvpool_operator.observe.sidecar_poll import poll_sidecars
from kvpool_operator.pools.secrets import generate_secret, with_keys
from kvpool_operator.sidecars.operation import SidecarAddress

if TYPE_CHECKING:
    from kvpool_operator.api.operation import KVCacheOperation
    from kvpool_operator.desired.inputs import PoolSecret
    from kvpool_operator.k8s.client import ApiClient, Manifest
    from kvpool_operator.pki.authority_root import AuthorityRoot
    from kvpool_operator.sidecars.status_client import StatusClient

__all__ = ["PoolAccess", "PoolLookup"]


@dataclass(frozen=True)
class PoolLookup:
    """The pool of an operation, or why the operation cannot work on it."""

    pool: KVCachePool | None = None
    problem: str = ""
    """Empty if `pool` is set."""
    is_deleting: bool = False
    """The pool is being deleted: the operation is cancelled."""


class PoolAccess:
    """Reads on behalf of operations."""

    def __init__(self, cluster: ApiClient, status_client: StatusClient, root: AuthorityRoot) -> None:
        self._cluster = cluster
        self._root = root
        self._status_client = status_client

    async def lookup(self, operation: KVCacheOperation) -> PoolLookup:
        """The pool that the operation names."""
        name = operation.spec.pool_ref.name
        raw = await self._cluster.get(ObjectRef(KIND, operation.metadata.namespace, name))
        if raw is None:
            return PoolLookup(problem=f"KVCachePool {name} does not exist in this namespace")
        try:
            pool = KVCachePool.parse(raw)
        except InvalidPoolError:
            return PoolLookup(problem=f"the spec of KVCachePool {name} is invalid: see its conditions")
        if pool.metadata.deletion_timestamp:
            return PoolLookup(problem=f"KVCachePool {name} is being deleted", is_deleting=True)
        return PoolLookup(pool)

    async def secret(self, pool: KVCachePool) -> PoolSecret | None:
        """The pool's random values; None before its Secret exists."""
        meta = pool.metadata
        live = await self._cluster.get(ObjectRef("Secret", meta.namespace, names.secret(meta.name)))
        return None if live is None else with_keys(read_secret(live, generate_secret()), self._root, meta)

    async def tenants(self, namespace: str) -> list[Manifest]:
        """The KVCacheTenants of the namespace."""
        return await self._cluster.list(TENANT_KIND, namespace=namespace)

    async def sidecars(self, pool: KVCachePool) -> list[SidecarAddress]:
        """One sidecar for each node that has or will have one; without an address while it cannot be reached.

        If a node has two pods, both are polled to find the one that serves.
        """
        wanted = ",".join(f"{k}={v}" for k, v in sorted(labels.selector(pool, "sidecar").items()))
        pods = await self._cluster.list("Pod", namespace=pool.metadata.namespace, labels=wanted)
        living = [p for p in pods if podview.is_staying(p)]
        count = Counter(podview.node(p) for p in living)
        reports = await poll_sidecars(self._status_client, [p for p in living if count[podview.node(p)] > 1])
        addresses = {podview.node(p): "" for p in pods}
        addresses |= {s.node: s.address for s in active_sidecars(living, reports)}
        return [SidecarAddress(node, address) for node, address in sorted(addresses.items()) if node]
