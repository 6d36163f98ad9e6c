"""The ConfigMap with pool.json, and the digest that rolls the pods when they cannot take what changed as they run."""

from __future__ import annotations

import hashlib
import hmac
import json
from typing import TYPE_CHECKING

from kvpool.config import dumps, static_part
from kvpool_operator.desired import names
from kvpool_operator.desired.config import to_pool_config
from kvpool_operator.desired.labels import metadata
from kvpool_operator.desired.services import index_url

if TYPE_CHECKING:
    from kvpool.config import PoolConfig
    from kvpool_operator.desired.inputs import Inputs, Manifest

__all__ = ["config_digest", "config_text", "configmap", "pool_config"]


def pool_config(inputs: Inputs) -> PoolConfig:
    """The configuration of this pool's sidecars."""
    external = inputs.external
    return to_pool_config(
        inputs.pool,
        pool_id=inputs.secret.pool_id,
        index_url=external.url if external else index_url(inputs.pool),
        index_username=external.username if external else "kvpool",
        allowed_namespaces=inputs.allowed_namespaces,
        tenants=inputs.tenants,
    )


def configmap(inputs: Inputs) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(inputs.pool, names.config(inputs.pool.metadata.name), "config"),
        "data": {"pool.json": config_text(inputs)},
    }


def config_text(inputs: Inputs) -> str:
    """`pool.json`. What a sidecar that runs it says of itself is kvpool.config.digest of it."""
    return dumps(pool_config(inputs))


def config_digest(inputs: Inputs) -> str:
    """Changes with whatever a running sidecar must be restarted for; what it takes live is not that.

    Passwords and certificates are not in it: a sidecar reads them anew for each connection. Keyed with the pool's
    secret, because the digest is an annotation that many may read.
    """
    text = json.dumps(static_part(pool_config(inputs)), sort_keys=True)
    return hmac.new(inputs.secret.pool_secret.encode(), text.encode(), hashlib.sha256).hexdigest()[:16]
