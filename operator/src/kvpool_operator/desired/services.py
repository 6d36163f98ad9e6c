"""Services of the index and of the sidecars (for monitoring)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvpool_operator.api.fields import HTTP_PORT, INDEX_PORT
from kvpool_operator.desired import names
from kvpool_operator.desired.labels import metadata, selector

if TYPE_CHECKING:
    from kvpool_operator.api.v1alpha1 import KVCachePool
    from kvpool_operator.desired.inputs import Manifest

__all__ = ["PROBE_PORT", "index_service", "sidecar_service"]

PROBE_PORT: Final = 7424
"""Port of the managed index's probes; they report only whether Redis responds."""


def index_service(pool: KVCachePool) -> Manifest | None:
    """Return the Service of the index; None for an external index."""
    if pool.spec.index.external is not None:
        return None
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(pool, names.index(pool.metadata.name), "index"),
        "spec": {
            "selector": selector(pool, "index"),
            "ports": [{"name": "redis", "port": INDEX_PORT, "protocol": "TCP", "targetPort": "redis"}],
        },
    }


def sidecar_service(pool: KVCachePool) -> Manifest:
    """Return the headless Service with a DNS name for each sidecar. Sidecars find each other by the index."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(pool, names.sidecar(pool.metadata.name), "sidecar"),
        "spec": {
            "clusterIP": "None",
            "selector": selector(pool, "sidecar"),
            "ports": [
                {"name": "http", "port": HTTP_PORT, "protocol": "TCP", "targetPort": "http"},
                {"name": "peer", "port": pool.spec.transport.port, "protocol": "TCP", "targetPort": "peer"},
            ],
        },
    }
