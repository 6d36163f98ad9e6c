"""Another password for the managed index, when the spec asks for one. Pure.

A new password stands beside the old one in the pool's Secret. The index takes both, in whatever order the Secret gets
to nodes; each sidecar shows the new one first and tells by a digest which was taken. When all have shown the new one,
the old one goes (docs/reference/managed-index.md).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvpool.protocol.keys import index_login

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpool_operator.api.v1alpha1 import KVCachePool
    from kvpool_operator.desired.inputs import PoolSecret
    from kvpool_operator.observe.snapshot import Sidecar

__all__ = ["nodes_without_new_password", "requested_revision", "rotate_password"]


def rotate_password(pool: KVCachePool, secret: PoolSecret, fresh: str, sidecars: Sequence[Sidecar]) -> PoolSecret:
    """What the Secret should hold now; `secret` itself when nothing is to be done. `fresh`: a password not used yet."""
    if pool.spec.index.external is not None:
        return secret
    if secret.managed_index_previous:
        told = bool(sidecars) and not nodes_without_new_password(secret, sidecars)
        return replace(secret, managed_index_previous="") if told else secret
    wanted = requested_revision(pool)
    if wanted == secret.managed_index_revision:
        return secret
    return replace(
        secret,
        managed_index_password=fresh,
        managed_index_previous=secret.managed_index_password,
        managed_index_revision=wanted,
    )


def requested_revision(pool: KVCachePool) -> str:
    """Which password the spec asks for."""
    return str(pool.spec.index.managed.password_revision if pool.spec.index.managed else 0)


def nodes_without_new_password(secret: PoolSecret, sidecars: Sequence[Sidecar]) -> list[str]:
    """The nodes whose sidecar has not shown the new password yet."""
    new = index_login(secret.pool_secret.encode(), secret.managed_index_password)
    return sorted(s.node or "a node" for s in sidecars if s.report is None or s.report.index_login != new)
