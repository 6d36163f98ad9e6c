"""Who holds the places and bytes of the landing zone. Pure: no clock, no lock, no I/O.

A tenant may hold three quarters of the zone. Where the zone is full, the pod with the largest share of the tenant with
the largest share gives way to one with a smaller share, so that shares become equal under pressure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Share", "WriteLedger", "Writer"]

_TENANT_SHARE = 0.75


class Writer(NamedTuple):
    """A pod and its tenant."""

    tenant: bytes  # tag
    pod: str  # uid


class Share(NamedTuple):
    """Unfinished writes and their bytes."""

    places: int = 0
    bytes: int = 0

    def plus(self, size: int) -> Share:
        """Return the share with one more write of `size` bytes."""
        return Share(self.places + 1, self.bytes + size)

    def minus(self, size: int) -> Share:
        """Return the share with one write of `size` bytes less."""
        return Share(self.places - 1, self.bytes - size)

    def within(self, limit: Share) -> bool:
        """Return whether the share is at most `limit`."""
        return self.places <= limit.places and self.bytes <= limit.bytes

    def of(self, limit: Share) -> float:
        """Return the larger of the two fractions of `limit`."""
        return max(self.places / limit.places, self.bytes / limit.bytes)


_NONE = Share()


class WriteLedger:
    """Shares by pod, by tenant and in total. Not thread-safe."""

    def __init__(self, limit: Share) -> None:
        self.limit = limit
        self.total = _NONE
        self._tenant_limit = Share(max(1, int(limit.places * _TENANT_SHARE)), int(limit.bytes * _TENANT_SHARE))
        self._tenants: dict[bytes, Share] = {}
        self._pods: dict[Writer, Share] = {}

    def count(self, owner: Writer, sizes: Sequence[int]) -> int:
        """Return how many writes of `sizes`, in this order, fit now."""
        return _count(sizes, (self.tenant(owner.tenant), self._tenant_limit), (self.total, self.limit))

    def count_alone(self, sizes: Sequence[int]) -> int:
        """Return how many writes of `sizes` would fit if the tenant wrote nothing else."""
        return _count(sizes, (_NONE, self._tenant_limit))

    def charge(self, owner: Writer, size: int) -> None:
        """Charge one write to the pod."""
        self.total = self.total.plus(size)
        self._tenants[owner.tenant] = self.tenant(owner.tenant).plus(size)
        self._pods[owner] = self.pod(owner).plus(size)

    def release(self, owner: Writer, size: int) -> None:
        """End the charge of one write."""
        self.total = self.total.minus(size)
        tenant, pod = self.tenant(owner.tenant).minus(size), self.pod(owner).minus(size)
        if tenant.places:
            self._tenants[owner.tenant] = tenant
        else:
            del self._tenants[owner.tenant]
        if pod.places:
            self._pods[owner] = pod
        else:
            del self._pods[owner]

    def tenant(self, tenant: bytes) -> Share:
        """Return the share of a tenant."""
        return self._tenants.get(tenant, _NONE)

    def pod(self, owner: Writer) -> Share:
        """Return the share of a pod."""
        return self._pods.get(owner, _NONE)

    def tenants(self) -> dict[bytes, Share]:
        """Return the shares by tenant."""
        return dict(self._tenants)

    def yielding(self, owner: Writer, size: int) -> list[Writer]:
        """Return the pods that give way to a write of `size` bytes of `owner`, the first one first.

        Only pods with a larger share than `owner` has with this write; within the tenant if its part is full.
        """
        pod_share = self.pod(owner).plus(size).of(self.limit)
        own = [one for one in self._pods if one.tenant == owner.tenant and one != owner]
        larger = [one for one in own if self._of(one) > pod_share]
        larger.sort(key=self._of, reverse=True)
        if not self.tenant(owner.tenant).plus(size).within(self._tenant_limit):
            return larger
        tenant_share = self.tenant(owner.tenant).plus(size).of(self.limit)
        others = [
            one
            for one in self._pods
            if one.tenant != owner.tenant and self.tenant(one.tenant).of(self.limit) > tenant_share
        ]
        others.sort(key=lambda one: (self.tenant(one.tenant).of(self.limit), self._of(one)), reverse=True)
        return others + larger

    def _of(self, owner: Writer) -> float:
        return self.pod(owner).of(self.limit)


def _count(sizes: Sequence[int], *shares_and_limits: tuple[Share, Share]) -> int:
    """Return how many of `sizes` can be added to each share before one exceeds its limit."""
    shares = [share for share, _ in shares_and_limits]
    for number, size in enumerate(sizes):
        shares = [share.plus(size) for share in shares]
        if not all(share.within(limit) for share, (_, limit) in zip(shares, shares_and_limits, strict=True)):
            return number
    return len(sizes)
