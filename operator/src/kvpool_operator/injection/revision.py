"""Revision of the injected settings: a pod with another revision is outdated.

The webhook writes the revision into annotation kvpool.dev/injected-revision; the operator compares it with the revision
of the current spec. It covers only the settings of the pod's engine kind, so that other changes do not outdate the pod.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kvpool_operator.api.annotations import CLIENTLESS_ENGINES, ENGINE_KINDS
from kvpool_operator.api.quantity import to_bytes
from kvpool_operator.desired.config import to_client_config
from kvpool_operator.injection.connector import compact

if TYPE_CHECKING:
    from kvpool_operator.api.v1alpha1 import KVCachePool

__all__ = ["revision", "revisions"]


def revision(
    kind: str,
    *,
    client_config: str,
    block_tokens: int,
    host_memory_bytes: int,
    kvbm_host_bytes: int,
    kvbm_disk_bytes: int,
) -> str:
    """Return eight hexadecimal digits. `client_config` is the JSON that the client reads."""
    injected: dict[str, Any] = {"client": client_config}
    if kind in ("vllm", "vllm-pd"):
        injected |= {"blockTokens": block_tokens, "hostMemory": host_memory_bytes}
    elif kind in CLIENTLESS_ENGINES:
        injected = {"kvbmHost": kvbm_host_bytes, "kvbmDisk": kvbm_disk_bytes}
    return hashlib.sha256(compact(injected).encode()).hexdigest()[:8]


def revisions(pool: KVCachePool) -> dict[str, str]:
    """Return the current revision by engine kind."""
    injection = pool.spec.injection
    return {
        kind: revision(
            kind,
            client_config=compact(asdict(to_client_config(pool))),
            block_tokens=pool.spec.cache.block_tokens,
            host_memory_bytes=to_bytes(injection.vllm.host_memory),
            kvbm_host_bytes=to_bytes(injection.dynamo.host_memory),
            kvbm_disk_bytes=to_bytes(injection.dynamo.disk_cache),
        )
        for kind in ENGINE_KINDS
    }
