"""Which pool a pod gets: a cached view of the KVCachePools, and the choice among them.

The view is listed every few seconds; a pod that finds no pool makes it look once more before it is refused, so that a
pool and a pod applied together meet. When the API cannot be reached the last view stays in use.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from kvpool_operator.api.annotations import ANNOTATION_POOL
from kvpool_operator.api.quantity import to_bytes
from kvpool_operator.api.v1alpha1 import KVCachePool
from kvpool_operator.desired.config import to_client_config
from kvpool_operator.errors import InvalidPoolError
from kvpool_operator.injection.skip import Skip, SkipReason
from kvpool_operator.k8s.selectors import matches

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvpool.config import ClientConfig
    from kvpool_operator.injection.annotations import InjectionRequest

__all__ = ["PoolCache", "PoolReader", "PoolView", "choose"]

log = logging.getLogger(__name__)

_RETRYABLE: Final = frozenset({SkipReason.POOL_NOT_FOUND, SkipReason.NAMESPACE_NOT_ALLOWED})


class PoolReader(Protocol):
    """What is read of the cluster."""

    async def list_pools(self) -> list[dict[str, Any]]:
        """All KVCachePools as JSON objects."""
        ...

    async def namespace_labels(self, name: str) -> dict[str, str]:
        """Labels of a namespace; empty when it does not exist."""
        ...


@dataclass(frozen=True)
class PoolView:
    """The part of a KVCachePool that injection needs."""

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

    @property
    def key(self) -> str:
        """namespace/name"""
        return f"{self.namespace}/{self.name}"

    def admits(self, namespace: str, labels: Mapping[str, str]) -> bool:
        """Whether pods of this namespace may use the pool."""
        if self.allowed_from == "All" or namespace == self.namespace:
            return True
        return self.allowed_from == "Selector" and matches(self.allowed_selector, labels)


def choose(pools: Sequence[PoolView], wishes: InjectionRequest, namespace: str, labels: Mapping[str, str]) -> PoolView:
    """The pool for a pod of `namespace`, or Skip.

    `namespace/name` is that pool. A bare name is the pool of that name in the pod's own namespace, else the only one of
    that name that admits the pod. No name is the only pool of the pod's namespace, else the only one that admits it.
    """
    asked = "/".join(p for p in (wishes.pool_namespace, wishes.pool_name) if p)
    named = [p for p in pools if not wishes.pool_name or p.name == wishes.pool_name]
    found = [p for p in named if p.namespace == (wishes.pool_namespace or namespace)]
    if not found and not wishes.pool_namespace:
        found = named
    if not found:
        what = f"there is no KVCachePool {asked}" if asked else "there is no KVCachePool yet"
        raise Skip(SkipReason.POOL_NOT_FOUND, f"{what}; create it, or correct annotation {ANNOTATION_POOL}")
    admitting = [p for p in found if p.admits(namespace, labels)]
    if not admitting:
        raise Skip(
            SkipReason.NAMESPACE_NOT_ALLOWED,
            f"spec.injection.allowedNamespaces of {asked or 'every pool'} does not admit namespace {namespace}",
        )
    enabled = [p for p in admitting if p.enabled]
    if not enabled:
        raise Skip(SkipReason.INJECTION_DISABLED, f"spec.injection.enabled of {admitting[0].key} is false")
    if len(enabled) > 1:
        keys = ", ".join(sorted(p.key for p in enabled)[:5])
        raise Skip(SkipReason.POOL_AMBIGUOUS, f"several pools fit ({keys}); set annotation {ANNOTATION_POOL} to one")
    return enabled[0]


class PoolCache:
    """The view. One event loop; `resolve` is called by requests, `run` by one task."""

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
        self._labels: dict[str, tuple[float, dict[str, str]]] = {}
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
        """List again and again until cancelled; failures are logged and the last view stays."""
        while True:
            try:
                await self.refresh()
            except Exception as e:
                log.warning("pools cannot be listed (%s); the view is %.0f s old", e, self.age_s)
            await asyncio.sleep(self._refresh_s)

    async def refresh(self) -> None:
        """List the pools now; one listing at a time."""
        started = self._clock()
        async with self._lock:
            if self._listed_at is not None and self._listed_at >= started:
                return  # another call listed while this one waited
            now = self._clock()
            self._pools = tuple(v for o in await self._reader.list_pools() if (v := _view(o)) is not None)
            self._listed_at = now

    async def resolve(self, wishes: InjectionRequest, namespace: str) -> PoolView:
        """The pool for a pod, or Skip."""
        if not self.synced:
            await self.refresh()
        try:
            return await self._choose(wishes, namespace)
        except Skip as skip:
            if skip.reason not in _RETRYABLE or self.age_s < min(1.0, self._refresh_s):
                raise
        self._labels.pop(namespace, None)
        await self.refresh()
        return await self._choose(wishes, namespace)

    async def _choose(self, wishes: InjectionRequest, namespace: str) -> PoolView:
        by_label = any(p.allowed_from == "Selector" for p in self._pools)
        return choose(self._pools, wishes, namespace, await self._namespace_labels(namespace) if by_label else {})

    async def _namespace_labels(self, namespace: str) -> dict[str, str]:
        now = self._clock()
        at, labels = self._labels.get(namespace, (float("-inf"), {}))
        if now - at > self._ttl_s:
            labels = await self._reader.namespace_labels(namespace)
            if len(self._labels) >= 10_000:  # bounded: namespaces come and go
                self._labels.clear()
            self._labels[namespace] = (now, labels)
        return labels


def _view(raw: dict[str, Any]) -> PoolView | None:
    """None, with a line in the log, for an object that cannot be read: one bad pool must not hide the others."""
    try:
        pool = KVCachePool.parse(raw)
    except InvalidPoolError as e:
        metadata = raw.get("metadata") or {}
        log.warning("pool %s/%s cannot be read: %s", metadata.get("namespace"), metadata.get("name"), e)
        return None
    injection = pool.spec.injection
    allowed = injection.allowed_namespaces
    conditions = (raw.get("status") or {}).get("conditions") or []
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
    )
