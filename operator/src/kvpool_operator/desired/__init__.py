"""Desired manifests of a pool's objects. Pure: equal inputs give equal manifests.

A builder returns the manifest, or None if the object must not exist; `build` returns them in the order of application.
`pools.plan` prunes other objects of the pool.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpool_operator.desired.configmap import configmap
from kvpool_operator.desired.daemonset import sidecar_daemonset
from kvpool_operator.desired.index import index_claim, index_statefulset
from kvpool_operator.desired.inputs import ExternalIndexUrl, Inputs, InstallationConfig, Manifest, PoolSecret
from kvpool_operator.desired.networkpolicy import network_policies
from kvpool_operator.desired.nfs import nfs_claims, nfs_volumes
from kvpool_operator.desired.rbac import index_account, sidecar_account
from kvpool_operator.desired.secrets import events_secret, hints_secret, secret
from kvpool_operator.desired.services import index_service, sidecar_service

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["ExternalIndexUrl", "Inputs", "InstallationConfig", "Manifest", "PoolSecret", "build"]


def build(inputs: Inputs) -> list[Manifest]:
    """Return the manifests of a pool in the order of application."""
    pool = inputs.pool
    wanted: Iterable[Manifest | None] = (
        sidecar_account(pool),
        index_account(pool),
        secret(inputs),
        events_secret(inputs),
        hints_secret(inputs),
        configmap(inputs),
        *network_policies(pool, inputs.env),
        *nfs_volumes(pool),
        *nfs_claims(pool),
        index_claim(inputs),
        index_service(pool),
        sidecar_service(pool),
        index_statefulset(inputs),
        sidecar_daemonset(inputs),
    )
    return [m for m in wanted if m is not None]
