"""Probe of the SGLang that is installed: whether its storage interface is the one that `PoolHiCache` was written for.

The version alone refuses nothing, unless KVPOOL_ENGINE_STRICT is 1: later releases keep the interface for months.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from kvpool.engines import tested_versions
from kvpool.engines.common.interface import difference, strict

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["problem"]

_METHODS = (
    "register_mem_pool_host", "register_mem_host_pool_v2", "get", "batch_get", "set", "batch_set", "exists",
    "batch_exists", "batch_get_v1", "batch_set_v1", "batch_exists_v2", "batch_get_v2", "batch_set_v2", "clear",
    "get_stats",
)  # fmt: skip
_FIELDS = {
    "HiCacheStorageConfig": (
        "tp_rank", "tp_size", "pp_rank", "pp_size", "is_mla_model", "model_name", "extra_config",
    ),
    "PoolTransfer": ("name", "keys", "host_indices", "hit_policy"),
    "PoolTransferResult": ("kv_hit_pages", "extra_pool_hit_pages", "restorable_prefix_pages"),
    "PoolHitPolicy": ("ALL_PAGES", "TRAILING_PAGES"),
}  # fmt: skip


def problem(storage: Any, plugin: type, version: str, environment: Mapping[str, str] = os.environ) -> str:
    """Return why `plugin` cannot be the storage of this SGLang; empty if it can.

    `storage`: the module sglang.srt.mem_cache.hicache_storage.
    """
    if strict(environment) and not tested_versions.is_tested("sglang", version):
        tested = tested_versions.described("sglang")
        return f"SGLang {tested} is tested, this is {version}, and KVPOOL_ENGINE_STRICT=1 is set"
    missing = [name for name in _FIELDS if not hasattr(storage, name)]
    if missing:
        found = f"{missing[0]} is missing"
    else:
        fields = {name: (getattr(storage, name), wanted) for name, wanted in _FIELDS.items()}
        found = difference(storage.HiCacheStorage, plugin, _METHODS, fields)
    return f"SGLang {version or 'of an unknown version'} has another storage interface: {found}" if found else ""
