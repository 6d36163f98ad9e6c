"""ConfigMap with pool.json, and the digests that identify the configuration of a sidecar."""

from __future__ import annotations

import hashlib
import hmac
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvpool.config import digest, dumps, static_part
from kvpool_operator.desired import names
from kvpool_operator.desired.config import to_pool_config
from kvpool_operator.desired.labels import metadata
from kvpool_operator.desired.services import index_url

if TYPE_CHECKING:
    from kvpool.config import PoolConfig
    from kvpool_operator.desired.inputs import Inputs, Manifest

__all__ = ["RenderedConfig", "configmap", "render_config"]


@dataclass(frozen=True)
class RenderedConfig:
    """The configuration of a pool's sidecars, rendered once per reconcile."""

    config: PoolConfig
    text: str
    """pool.json."""
    digest: str
    """kvpool.config.digest of the text; a sidecar that runs it reports the same digest."""
    restart_digest: str
    """Changes with every setting that a running sidecar must be restarted for, and with no other."""


def render_config(inputs: Inputs) -> RenderedConfig:
    """Render the configuration. Use `Inputs.config`, which caches the result.

    The restart digest leaves out passwords and certificates, because a sidecar reads them again for each connection.
    It is keyed with the pool's secret, because it is an annotation that many may read.
    """
    external = inputs.external
    config = to_pool_config(
        inputs.pool,
        pool_id=inputs.secret.pool_id,
        index_url=external.url if external else index_url(inputs.pool),
        index_username=external.username if external else "kvpool",
        allowed_namespaces=inputs.allowed_namespaces,
        tenants=inputs.tenants,
    )
    text = dumps(config)
    restart_text = json.dumps(static_part(config), sort_keys=True)
    keyed = hmac.new(inputs.secret.pool_secret.encode(), restart_text.encode(), hashlib.sha256)
    return RenderedConfig(config, text, digest(text), keyed.hexdigest()[:16])


def configmap(inputs: Inputs) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(inputs.pool, names.config(inputs.pool.metadata.name), "config"),
        "data": {"pool.json": inputs.config.text},
    }
