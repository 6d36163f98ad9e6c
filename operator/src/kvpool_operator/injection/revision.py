"""What injection takes from a pool, as one short word: a pod that carries another word is outdated. Pure.

The webhook writes the word on the pod (annotation kvpool.dev/injected-revision); the operator compares it with the one
of the present spec. It is over what the pod's family of engines is told, so that a change that does not concern a pod
does not make it outdated.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kvpool_operator.api.annotations import CLIENTLESS_ENGINES, ENGINE_KINDS
from kvpool_operator.api.quantity import to_bytes
from kvpool_operator.desired.config import to_client_config

if TYPE_CHECKING:
    from kvpool_operator.api.v1alpha1 import KVCachePool

__all__ = ["revision", "revisions"]


def revision(
    family: str,
    *,
    client_config: str,
    block_tokens: int,
    host_memory_bytes: int,
    kvbm_host_bytes: int,
    kvbm_disk_bytes: int,
) -> str:
    """Eight hexadecimal digits. `client_config`: the JSON that the client reads."""
    told: dict[str, Any] = {"client": client_config}
    if family in ("vllm", "vllm-pd"):
        told |= {"blockTokens": block_tokens, "hostMemory": host_memory_bytes}
    elif family in CLIENTLESS_ENGINES:
        told = {"kvbmHost": kvbm_host_bytes, "kvbmDisk": kvbm_disk_bytes}
    return hashlib.sha256(_compact(told).encode()).hexdigest()[:8]


def revisions(pool: KVCachePool) -> dict[str, str]:
    """By family: what a pod that is injected now would carry."""
    injection = pool.spec.injection
    return {
        family: revision(
            family,
            client_config=_compact(asdict(to_client_config(pool))),
            block_tokens=pool.spec.cache.block_tokens,
            host_memory_bytes=to_bytes(injection.vllm.host_memory),
            kvbm_host_bytes=to_bytes(injection.dynamo.host_memory),
            kvbm_disk_bytes=to_bytes(injection.dynamo.disk_cache),
        )
        for family in ENGINE_KINDS
    }


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), sort_keys=True, ensure_ascii=False)
