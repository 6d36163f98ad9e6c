"""Leader election with a Lease. A process that cannot renew its Lease ends.

The Lease of another replica expires by this machine's monotonic clock since its last change, never by the time written
in it, so clocks need not agree. The method is that of client-go's leader election.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from kvpool_operator.errors import ConflictError, NotLeaderError, OperatorError
from kvpool_operator.k8s.client import ApiClient, Manifest, ObjectRef

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["FencedClient", "Lease"]

log = logging.getLogger(__name__)

LEASE_S: Final = 15.0
RENEW_DEADLINE_FRACTION: Final = 2 / 3
"""A leader that could not renew for this part of the Lease's duration gives up, before another may take over."""
RENEW_DEADLINE_S: Final = LEASE_S * RENEW_DEADLINE_FRACTION
RETRY_FRACTION: Final = 2 / 15
CALL_TIMEOUT_FRACTION: Final = 4 / 15
"""Timeout of a call: a second one fits in before the Lease is lost."""


class Lease:
    """The right to write: `acquire`, then `renew_loop` in a task, then `release`."""

    def __init__(
        self,
        cluster: ApiClient,
        namespace: str,
        name: str,
        identity: str,
        *,
        lease_s: float = LEASE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cluster = cluster
        self._ref = ObjectRef("Lease", namespace, name)
        self._identity = identity
        self._lease_s = lease_s
        self._clock = clock
        self._renewed: float | None = None
        self._seen: tuple[Any, float] | None = None

    @property
    def is_leader(self) -> bool:
        """Whether this process may write now."""
        return self._renewed is not None and self._clock() - self._renewed < self._lease_s * RENEW_DEADLINE_FRACTION

    async def acquire(self, retry_s: float | None = None) -> None:
        """Wait until this replica holds the Lease."""
        while True:
            if await self._try():
                break
            await asyncio.sleep(self._lease_s * RETRY_FRACTION if retry_s is None else retry_s)
        log.info("leading as %s", self._identity)

    async def renew_loop(self, retry_s: float | None = None) -> None:
        """Renew; returns when the Lease is lost."""
        while self.is_leader:
            await asyncio.sleep(self._lease_s * RETRY_FRACTION if retry_s is None else retry_s)
            await self._try()
        log.error("the Lease was lost: this replica stops")

    async def release(self) -> None:
        """Give up the Lease, so that another replica takes over immediately."""
        if self.is_leader:
            self._renewed = None
            with contextlib.suppress(OperatorError):
                lease = await self._cluster.get(self._ref)
                if lease is not None and lease["spec"].get("holderIdentity") == self._identity:
                    await self._write(lease, {**lease["spec"], "holderIdentity": "", "leaseDurationSeconds": 1})

    async def _try(self) -> bool:
        """Acquire or renew the Lease if it is free or ours. A renewal counts from its start."""
        started = self._clock()
        try:
            async with asyncio.timeout(self._lease_s * CALL_TIMEOUT_FRACTION):
                taken = await self._take()
        except ConflictError:
            return False
        except (OperatorError, TimeoutError) as e:
            log.warning("the Lease cannot be renewed: %s", e or "no answer in time")
            return False
        if taken:
            self._renewed = started
        return taken

    async def _take(self) -> bool:
        lease = await self._cluster.get(self._ref)
        if lease is None:
            await self._cluster.create(
                {
                    "apiVersion": "coordination.k8s.io/v1",
                    "kind": "Lease",
                    "metadata": {"name": self._ref.name, "namespace": self._ref.namespace},
                    "spec": self._spec(0, acquired=None),
                }
            )
            return True
        return await self._renew(lease)

    async def _renew(self, lease: Manifest) -> bool:
        spec = lease.get("spec") or {}
        holder = spec.get("holderIdentity")
        if holder == self._identity:
            await self._write(lease, self._spec(int(spec.get("leaseTransitions") or 0), spec.get("acquireTime")))
            return True
        mark = (holder, spec.get("renewTime"), spec.get("leaseTransitions"))
        if self._seen is None or self._seen[0] != mark:
            self._seen = (mark, self._clock())
        if holder and self._clock() - self._seen[1] < float(spec.get("leaseDurationSeconds") or self._lease_s):
            return False
        await self._write(lease, self._spec(int(spec.get("leaseTransitions") or 0) + 1, acquired=None))
        return True

    async def _write(self, lease: Manifest, spec: Manifest) -> None:
        version = lease["metadata"]["resourceVersion"]
        await self._cluster.patch(self._ref, {"metadata": {"resourceVersion": version}, "spec": spec})

    def _spec(self, transitions: int, acquired: Any) -> Manifest:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        return {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": int(self._lease_s),
            "acquireTime": acquired or now,
            "renewTime": now,
            "leaseTransitions": transitions,
        }


class FencedClient(ApiClient):
    """Write fence: refuses writes without the Lease, also in a process that was suspended and resumed."""

    def __init__(self, cluster: ApiClient, lease: Lease) -> None:
        self._cluster = cluster
        self._lease = lease

    async def get(self, target: ObjectRef) -> Manifest | None:
        return await self._cluster.get(target)

    async def list(
        self, kind: str, *, namespace: str = "", labels: str = "", fields: str = "", fresh: bool = False
    ) -> list[Manifest]:
        return await self._cluster.list(kind, namespace=namespace, labels=labels, fields=fields, fresh=fresh)

    async def create(self, manifest: Manifest) -> Manifest:
        self._check()
        return await self._cluster.create(manifest)

    async def apply(self, manifest: Manifest, *, subresource: str = "") -> Manifest:
        self._check()
        return await self._cluster.apply(manifest, subresource=subresource)

    async def patch(self, target: ObjectRef, patch: Manifest, *, subresource: str = "") -> Manifest:
        self._check()
        return await self._cluster.patch(target, patch, subresource=subresource)

    async def delete(self, target: ObjectRef, *, uid: str = "", foreground: bool = False) -> None:
        self._check()
        await self._cluster.delete(target, uid=uid, foreground=foreground)

    async def evict(self, target: ObjectRef, *, uid: str) -> None:
        self._check()
        await self._cluster.evict(target, uid=uid)

    def _check(self) -> None:
        if not self._lease.is_leader:
            raise NotLeaderError("this replica does not hold the Lease: the write was refused")
