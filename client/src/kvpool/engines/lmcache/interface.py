"""Probe of the LMCache that is installed: whether its interfaces are those that the plug-ins were written for.

The version alone refuses nothing, unless KVPOOL_ENGINE_STRICT is 1.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from kvpool.engines import tested_versions
from kvpool.engines.common.interface import difference, strict

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["adapter_problem", "connector_problem"]

_ADAPTER = (
    "get_store_event_fd", "get_lookup_and_lock_event_fd", "get_load_event_fd", "submit_store_task",
    "pop_completed_store_tasks", "submit_lookup_and_lock_task", "query_lookup_and_lock_result", "submit_unlock",
    "submit_load_task", "query_load_result", "delete", "list_l2_keys", "report_status", "close",
    "_notify_keys_stored", "_notify_keys_accessed", "_notify_keys_deleted",
)  # fmt: skip
_KEY = ("chunk_hash", "model_name", "kv_rank", "object_group_id", "cache_salt")
_CONNECTOR = (
    "exists", "exists_sync", "get", "put", "list", "close", "support_batched_get", "batched_get",
    "support_batched_contains", "batched_contains", "batched_async_contains",
)  # fmt: skip
_ENGINE_KEY = ("model_name", "world_size", "worker_id", "chunk_hash", "dtype", "tags")


def adapter_problem(
    base: type, plugin: type, key: type, version: str, environment: Mapping[str, str] = os.environ
) -> str:
    """Return why `plugin` cannot be an L2 adapter of this LMCache server; empty if it can. `key`: its ObjectKey."""
    return _problem(base, plugin, _ADAPTER, {"ObjectKey": (key, _KEY)}, version, environment)


def connector_problem(
    base: type, plugin: type, key: type, version: str, environment: Mapping[str, str] = os.environ
) -> str:
    """Return why `plugin` cannot be a remote connector of this LMCache; empty if it can. `key`: its CacheEngineKey."""
    return _problem(base, plugin, _CONNECTOR, {"CacheEngineKey": (key, _ENGINE_KEY)}, version, environment)


def _problem(
    base: type,
    plugin: type,
    methods: tuple[str, ...],
    fields: dict[str, Any],
    version: str,
    environment: Mapping[str, str],
) -> str:
    if strict(environment) and not tested_versions.is_tested("lmcache", version):
        tested = tested_versions.described("lmcache")
        return f"LMCache {tested} is tested, this is {version}, and KVPOOL_ENGINE_STRICT=1 is set"
    found = difference(base, plugin, methods, fields)
    return f"LMCache {version or 'of an unknown version'} has another interface: {found}" if found else ""
