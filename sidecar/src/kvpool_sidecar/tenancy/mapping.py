"""Tenants by namespace, and their limits. Pure but for the hashing of names.

A namespace is its own tenant unless the configuration groups it with others. The id of such a group contains a colon,
which no namespace has, so no namespace can pose as a member.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpool.protocol import keys
from kvpool_sidecar.tenancy.limits import NO_HINTS, TenantLimits

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvpool.config import PoolConfig, TenantConfig

__all__ = ["Tenancy"]


class Tenancy:
    """Tenants of one configuration. Immutable; holds the pool secret."""

    def __init__(self, secret: bytes, config: PoolConfig) -> None:
        self._hints = config.hints
        self._by_namespace = {n: tenant for tenant in config.tenants for n in tenant.namespaces}
        self._ids = {tenant.id for tenant in config.tenants}
        self._by_tag = {keys.tenant_tag(secret, tenant.id): tenant for tenant in config.tenants}

    def tenant_id(self, namespace: str) -> str:
        """Return the tenant id that block keys of this namespace's pods are derived from."""
        tenant = self._by_namespace.get(namespace)
        return namespace if tenant is None else tenant.id

    def display_name(self, namespace: str) -> str:
        """Return the name for users and routers: the namespace, or `kvt/NAME` of its tenant."""
        tenant = self._by_namespace.get(namespace)
        return namespace if tenant is None else f"kvt/{tenant.name}"

    def reads_from(self, namespace: str) -> tuple[str, ...]:
        """Return the ids of other tenants whose blocks this namespace's pods may read, in order."""
        tenant = self._by_namespace.get(namespace)
        return () if tenant is None else tuple(one for one in tenant.reads_from if one in self._ids)

    @property
    def tags(self) -> list[bytes]:
        """Tags of the configured tenants."""
        return list(self._by_tag)

    @property
    def hints_percent(self) -> int:
        """Percent of a tenant's bytes that its sessions may expect to use again; NO_HINTS: hints are off."""
        return self._hints.share_percent if self._hints.enabled else NO_HINTS

    def local_limits(self) -> Mapping[bytes, TenantLimits]:
        """Limits by tag on the drives of a node together."""
        limits = {tag: _limits(tenant, tenant.quota_bytes) for tag, tenant in self._by_tag.items()}
        if not self._hints.enabled:
            return limits
        shares = {tag: min(self._hints.share_percent, t.hints_share_percent) for tag, t in self._by_tag.items()}
        return {tag: one._replace(hints_percent=shares[tag]) for tag, one in limits.items()}

    def shared_limits(self) -> Mapping[bytes, TenantLimits]:
        """Limits by tag in the shared tier."""
        return {tag: _limits(tenant, tenant.shared_quota_bytes) for tag, tenant in self._by_tag.items()}


def _limits(tenant: TenantConfig, size: int) -> TenantLimits:
    return TenantLimits(size, tenant.idle_ttl_s, tenant.max_age_s, tenant.priority)
