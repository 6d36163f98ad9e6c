"""ServiceAccounts of a pool. They have no right in the API, and no pod of a pool mounts a token of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpool_operator.desired import names
from kvpool_operator.desired.labels import metadata

if TYPE_CHECKING:
    from kvpool_operator.api.v1alpha1 import KVCachePool
    from kvpool_operator.desired.inputs import Manifest

__all__ = ["index_account", "sidecar_account"]


def sidecar_account(pool: KVCachePool) -> Manifest:
    return _account(pool, names.sidecar(pool.metadata.name), "sidecar")


def index_account(pool: KVCachePool) -> Manifest | None:
    """Return None for an external index."""
    return None if pool.spec.index.external else _account(pool, names.index(pool.metadata.name), "index")


def _account(pool: KVCachePool, name: str, component: str) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": metadata(pool, name, component),
        "automountServiceAccountToken": False,
    }
