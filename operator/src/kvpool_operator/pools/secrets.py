"""Random values of a pool: its secret, and the password of the managed index with its rotation.

A new password is added to the pool's Secret beside the old one. The index accepts both, in whatever order the Secret
reaches the nodes; each sidecar uses the new one first and reports by a digest which one was accepted. The old password
is removed when all sidecars use the new one (docs/reference/prefix-index.md).
"""

from __future__ import annotations

import secrets
import uuid
from dataclasses import replace
from typing import TYPE_CHECKING

from kvpool.protocol.keys import index_login
from kvpool_operator.api.tenant import tenant_id
from kvpool_operator.desired import names
from kvpool_operator.desired.daemonset import obtains_certificates
from kvpool_operator.desired.inputs import PoolSecret
from kvpool_operator.desired.secrets import read_secret
from kvpool_operator.desired.shared_keys import next_keys
from kvpool_operator.pki.authority_root import PoolIdentity
from kvpool_operator.pki.index_tls import index_files
from kvpool_operator.pki.peer_ca import derived_keys, peer_files

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from kvpool_operator.api.v1alpha1 import KVCachePool, Metadata
    from kvpool_operator.observe.snapshot import Sidecar, Snapshot
    from kvpool_operator.pki.authority_root import AuthorityRoot

__all__ = ["generate_secret", "nodes_without_new_password", "pool_secret", "rotate_password", "with_keys"]


def pool_secret(
    meta: Metadata, pool: KVCachePool | None, snapshot: Snapshot, root: AuthorityRoot, now: datetime
) -> PoolSecret:
    """The values of the pool's Secret; new ones only for what is missing or due for rotation."""
    live = snapshot.object("Secret", names.secret(meta.name))
    generated = generate_secret(str(snapshot.status.get("poolID") or ""))
    secret = read_secret(live or {}, generated)
    identity = PoolIdentity(meta.namespace, meta.name, secret.pool_id)
    daemonset = snapshot.object("DaemonSet", names.sidecar(meta.name))
    authority = peer_files(secret.peer_files, root, identity, now, is_rolled=obtains_certificates(daemonset))
    secret = replace(secret, peer_files=authority.published, peer_keys=authority.keys)
    if pool is None:
        return secret
    if secret.shared_keys or any(tier.is_encrypted for tier in pool.spec.tiers):
        tenants = [tenant_id(one.name, str(one.raw["metadata"].get("uid"))) for one in snapshot.tenants]
        keys = next_keys(secret.shared_keys, tenants, lambda: secrets.token_bytes(32))
        secret = replace(secret, shared_keys=keys)
    if pool.spec.index.is_encrypted:
        service = f"{names.index(meta.name)}.{meta.namespace}.svc"
        secret = replace(secret, index_files=index_files(secret.index_files, (service,), now))
    if live is None:
        return replace(secret, managed_index_revision=_requested_revision(pool))
    if pool.spec.mode != "Enforce":
        return secret
    return rotate_password(pool, secret, generated.managed_index_password, snapshot.sidecars)


def with_keys(secret: PoolSecret, root: AuthorityRoot, meta: Metadata) -> PoolSecret:
    """Add the derived keys of the CA to what the Secret contains."""
    identity = PoolIdentity(meta.namespace, meta.name, secret.pool_id)
    return replace(secret, peer_keys=derived_keys(secret.peer_files, root, identity))


def generate_secret(known_pool_id: str = "") -> PoolSecret:
    """Generate new values. `known_pool_id` (of the pool's status) keeps its directories usable if the Secret was lost.

    This is the only source of a pool's random values.
    """
    return PoolSecret(
        pool_id=known_pool_id or str(uuid.uuid4()),
        pool_secret=secrets.token_hex(32),
        managed_index_password=secrets.token_urlsafe(32),
    )


def rotate_password(pool: KVCachePool, secret: PoolSecret, generated: str, sidecars: Sequence[Sidecar]) -> PoolSecret:
    """The next state of the rotation; `secret` itself if nothing is due. `generated`: an unused password. Pure."""
    if pool.spec.index.external is not None:
        return secret
    if secret.managed_index_previous:
        is_done = bool(sidecars) and not nodes_without_new_password(secret, sidecars)
        return replace(secret, managed_index_previous="") if is_done else secret
    requested = _requested_revision(pool)
    if requested == secret.managed_index_revision:
        return secret
    return replace(
        secret,
        managed_index_password=generated,
        managed_index_previous=secret.managed_index_password,
        managed_index_revision=requested,
    )


def nodes_without_new_password(secret: PoolSecret, sidecars: Sequence[Sidecar]) -> list[str]:
    """Nodes whose sidecar has not used the new password yet. Pure."""
    new = index_login(secret.pool_secret.encode(), secret.managed_index_password)
    return sorted(s.node or "a node" for s in sidecars if s.report is None or s.report.index_login != new)


def _requested_revision(pool: KVCachePool) -> str:
    return str(pool.spec.index.managed.password_revision if pool.spec.index.managed else 0)
