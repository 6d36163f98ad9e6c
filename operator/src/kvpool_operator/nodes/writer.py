"""Writes KVCacheNodes to the API."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvpool_operator.k8s.client import ApiClient, Manifest

__all__ = ["write_node"]


async def write_node(manifest: Manifest, status: Manifest, cluster: ApiClient, *, new: bool) -> None:
    """Apply a KVCacheNode's status; with `new`, apply the object first."""
    if new:
        await cluster.apply(manifest)
    bare = {k: manifest[k] for k in ("apiVersion", "kind")}
    names_only = {"metadata": {k: manifest["metadata"][k] for k in ("name", "namespace")}}
    await cluster.apply({**bare, **names_only, "status": status}, subresource="status")
