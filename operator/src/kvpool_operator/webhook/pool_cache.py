"""Cache of the KVCachePools and of namespaces, from which the pool of a pod is selected.

The cache is listed every few seconds, and once more before a pod is left without a pool, so that a pool and a
pod can be applied together. While the API server is unavailable, the last list is used.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Protocol

from kvpool_operator.api.findings.codes import Code
from kvpool_operator.api.quantity import to_bytes
from kvpool_operator.api.v1alpha1 import KVCachePool
from kvpool_operator.desired.config import to_client_config
from kvpool_operator.errors import InvalidPoolError
from kvpool_operator.injection.pool_selection import NamespaceView, select
from kvpool_operator.injection.skip import Skip, SkipReason
from kvpool_operator.k8s.selectors import matches

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvpool.config import ClientConfig
    from kvpool_operator.injection.annotations import InjectionRequest
    from kvpool_operator.injection.pool_selection import SelectedBy

__all__ = ["PoolCache", "PoolReader", "PoolView", "pool_view"]

log = logging.getLogger(__name__)

_RETRYABLE: Final = frozenset({SkipReason.POOL_NOT_FOUND, SkipReason.NAMESPACE_NOT_ALLOWED})


class PoolReader(Protocol):
    """Access to the objects that the cache reads."""

    async def list_pools(self) -> list[dict[str, Any]]:
        """Return all KVCachePools as JSON objects."""
        ...

    async def read_namespace(self, name: str) -> NamespaceView:
        """Return labels and annotations of a namespace; empty if it does not exist."""
        ...


@dataclass(frozen=True)
class PoolView:
    """Fields of a KVCachePool that injection needs."""

    namespace: str
    name: str
    enabled: bool
    ready: bool
    block_tokens: int
    host_memory_bytes: int
    kvbm_host_bytes: int
    kvbm_disk_bytes: int
    client: ClientConfig
    allowed_from: str
    allowed_selector: Mapping[str, Any]
    pod_selector: Mapping[str, Any] | None = None
    status: Mapping[str, Any] = field(default_factory=dict)
    selected_by: SelectedBy = "label"
    """What selected the pod that this pool was resolved for."""

    @property
    def key(self) -> str:
        """namespace/name"""
        return f"{self.namespace}/{self.name}"

    def allows(self, namespace: str, labels: Mapping[str, str]) -> bool:
        """Whether the pool allows pods of this namespace."""
        if self.allowed_from == "All" or namespace == self.namespace:
            return True
        return self.allowed_from == "Selector" and matches(self.allowed_selector, labels)


class PoolCache:
    """Cache of the pools. Runs on one event loop: requests call `resolve`, one task runs `run`."""

    def __init__(
        self,
        reader: PoolReader,
        *,
        refresh_s: float = 5.0,
        namespace_ttl_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._reader = reader
        self._refresh_s = refresh_s
        self._ttl_s = namespace_ttl_s
        self._clock = clock
        self._pools: tuple[PoolView, ...] = ()
        self._namespaces: dict[str, tuple[float, NamespaceView]] = {}
        self._listed_at: float | None = None
        self._lock = asyncio.Lock()

    @property
    def synced(self) -> bool:
        """Whether the pools were listed at least once."""
        return self._listed_at is not None

    @property
    def age_s(self) -> float:
        """Seconds since the pools were last listed; infinite before the first time."""
        return self._clock() - self._listed_at if self._listed_at is not None else float("inf")

    def __len__(self) -> int:
        return len(self._pools)

    async def run(self) -> None:
        """List the pools periodically until cancelled. After a failure, which is logged, the last list is used."""
        while True:
            try:
                await self.refresh()
            except Exception as e:
                log.warning("cannot list the pools (%s); the cached list is %.0f s old", e, self.age_s)
            await asyncio.sleep(self._refresh_s)

    async def refresh(self) -> None:
        """List the pools now. Only one list request runs at a time."""
        started = self._clock()
        async with self._lock:
            if self._listed_at is not None and self._listed_at >= started:
                return  # another call listed while this one waited
            now = self._clock()
            self._pools = tuple(v for o in await self._reader.list_pools() if (v := pool_view(o)) is not None)
            self._listed_at = now

    @property
    def pools(self) -> Sequence[PoolView]:
        """The pools of the last list."""
        return self._pools

    async def resolve(self, request: InjectionRequest, namespace: str) -> PoolView | None:
        """Return the pool for a pod, None if nothing selects the pod, or raise Skip."""
        if not self.synced:
            await self.refresh()
        is_young = self.age_s < min(1.0, self._refresh_s)
        try:
            found = await self._select(request, namespace)
        except Skip as skip:
            if skip.reason not in _RETRYABLE or is_young:
                raise
        else:
            if found is not None or is_young:
                return found
        self._namespaces.pop(namespace, None)
        await self.refresh()
        return await self._select(request, namespace)

    async def _select(self, request: InjectionRequest, namespace: str) -> PoolView | None:
        is_needed = not (request.opted_in and request.pool_name) or any(
            p.allowed_from == "Selector" for p in self._pools
        )
        view = await self._namespace(namespace) if is_needed else NamespaceView()
        by, pool = select(self._pools, request, namespace, view)
        return None if pool is None else replace(pool, selected_by=by)

    async def _namespace(self, name: str) -> NamespaceView:
        now = self._clock()
        at, view = self._namespaces.get(name, (float("-inf"), NamespaceView()))
        if now - at > self._ttl_s:
            view = await self._reader.read_namespace(name)
            if len(self._namespaces) >= 10_000:  # bounded: namespaces come and go
                self._namespaces.clear()
            self._namespaces[name] = (now, view)
        return view


def pool_view(raw: dict[str, Any]) -> PoolView | None:
    """Return the view of a pool; None for an invalid object, which is logged: it does not hide the others."""
    try:
        pool = KVCachePool.parse(raw)
    except InvalidPoolError as e:
        metadata = raw.get("metadata") or {}
        name = f"{metadata.get('namespace')}/{metadata.get('name')}"
        log.warning("pool %s is invalid: %s [%s]", name, e, Code.INVALID_SPEC.value)
        return None
    injection = pool.spec.injection
    allowed = injection.allowed_namespaces
    status = raw.get("status") or {}
    conditions = status.get("conditions") or []
    return PoolView(
        namespace=pool.metadata.namespace,
        name=pool.metadata.name,
        enabled=injection.enabled,
        ready=any(c.get("type") == "Ready" and c.get("status") == "True" for c in conditions),
        block_tokens=pool.spec.cache.block_tokens,
        host_memory_bytes=to_bytes(injection.vllm.host_memory),
        kvbm_host_bytes=to_bytes(injection.dynamo.host_memory),
        kvbm_disk_bytes=to_bytes(injection.dynamo.disk_cache),
        client=to_client_config(pool),
        allowed_from=allowed.from_,
        allowed_selector=allowed.selector.model_dump(by_alias=True) if allowed.selector else {},
        pod_selector=injection.selector.model_dump(by_alias=True) if injection.selector else None,
        status=status,
    )
