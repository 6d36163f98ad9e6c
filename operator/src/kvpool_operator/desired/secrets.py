"""The Secret with a pool's random values. It has no owner: what it names may outlive the pool."""

from __future__ import annotations

import base64
import binascii
from typing import TYPE_CHECKING, Any

from kvpool_operator.desired import names
from kvpool_operator.desired.env import PoolSecret
from kvpool_operator.desired.labels import labels

if TYPE_CHECKING:
    from kvpool_operator.desired.env import Inputs, Manifest

__all__ = ["read_secret", "secret"]

_KEYS = {"pool-id": "pool_id", "pool-secret": "pool_secret", "managed-index-password": "managed_index_password"}


def read_secret(manifest: Manifest, fresh: PoolSecret) -> PoolSecret:
    """The values in an existing Secret; only what is missing or unreadable there is taken from `fresh`."""
    data: dict[str, Any] = manifest.get("data") or {}
    values = {}
    for key, field in _KEYS.items():
        try:
            values[field] = base64.b64decode(data[key], validate=True).decode("ascii")
        except (KeyError, TypeError, ValueError, binascii.Error):
            values[field] = ""
    return PoolSecret(**{f: v or getattr(fresh, f) for f, v in values.items()})


def secret(inputs: Inputs) -> Manifest:
    """Secret `NAME-secret`; the sidecars read `pool-secret`, `index-password` and the files for TLS to the index."""
    s = inputs.secret
    values = {
        "pool-id": s.pool_id,
        "pool-secret": s.pool_secret,
        "managed-index-password": s.managed_index_password,
        "index-password": inputs.index_password,
        **inputs.index_files,
    }
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": names.secret(inputs.pool.metadata.name),
            "namespace": inputs.pool.metadata.namespace,
            "labels": labels(inputs.pool.metadata.name, "secret"),
        },
        "type": "Opaque",
        "data": {k: base64.b64encode(v.encode()).decode() for k, v in values.items()},
    }
