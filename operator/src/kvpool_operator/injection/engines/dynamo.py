"""NVIDIA Dynamo's block manager (KVBM): tiers on the node, without sharing.

Its wheel has tiers for host memory and a private file, and no interface for a remote store
(docs/how-to/engines/dynamo.md). The injector sets sizes and a directory; the condition BlocksShareable reports that the
blocks are not shared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from kvpool_operator.injection.command_line import Channel
from kvpool_operator.injection.connector import compact, escape_expansion
from kvpool_operator.injection.engines.vllm import CONNECTOR_ARG
from kvpool_operator.injection.host_memory import host_memory
from kvpool_operator.injection.pod import add_volume, default_env, env_names, items, private_volume_name
from kvpool_operator.injection.skip import Skip, SkipReason
from kvpool_operator.k8s.merge_patch import merge_patch

if TYPE_CHECKING:
    from kvpool_operator.injection.context import InjectionContext

__all__ = ["VOLUME", "inject"]

VOLUME: Final = "kvpool-kvbm"
MOUNT: Final = "/var/lib/kvpool-kvbm"
CONNECTOR: Final = {
    "kv_connector": "DynamoConnector",
    "kv_connector_module_path": "kvbm.vllm_integration.connector",
    "kv_role": "kv_both",
}
_HOST: Final = ("DYN_KVBM_CPU_CACHE_GB", "DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS")
_DISK: Final = ("DYN_KVBM_DISK_CACHE_GB", "DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS", "DYN_KVBM_DISK_CACHE_DIR")


def inject(context: InjectionContext) -> list[str]:
    """Set sizes and directory that the user has not set, and the connector of a vLLM without one."""
    container, info, settings = context.container, context.info, context.settings
    if info.connector_present and not info.kvbm:
        raise Skip(
            SkipReason.CONNECTOR_PRESENT,
            f"container {container.get('name')} already has a KV connector other than Dynamo's; it is not changed",
        )
    if info.engine == "vllm" and not info.connector_present:
        _add_connector(context)
    env_set = env_names(container)
    memory, warnings = host_memory(context.pod, container, settings.kvbm_host_bytes, "", engines=context.engines)
    if not env_set & set(_HOST):
        default_env(container, _HOST[0], _gib(memory))
    if not env_set & set(_DISK) and settings.kvbm_disk_bytes:
        # KVBM creates a private file of that size; above the limit the kubelet evicts the pod
        limit = f"{-(-settings.kvbm_disk_bytes // 2**20) + 1024}Mi"
        name = private_volume_name(context.pod, container, VOLUME)
        add_volume(context.pod, container, {"name": name, "emptyDir": {"sizeLimit": limit}}, MOUNT)
        default_env(container, _DISK[0], _gib(settings.kvbm_disk_bytes))
        default_env(container, _DISK[2], MOUNT)
    return [*warnings, "KVBM has no remote tier: its blocks stay on their node and are not shared with other engines"]


def _add_connector(context: InjectionContext) -> None:
    if context.info.channel is not Channel.ARGS:
        raise Skip(
            SkipReason.COMMAND_NOT_EXTENDABLE,
            f"add {CONNECTOR_ARG} with DynamoConnector to the command line of {context.container.get('name')}",
        )
    connector: dict[str, Any] = merge_patch(dict(CONNECTOR), context.request.connector_patch or {})
    items(context.container, "args").extend([CONNECTOR_ARG, escape_expansion(compact(connector))])


def _gib(size: int) -> str:
    """Return whole GiB, at least one. KVBM reads GB as 10**9 or 2**30, so the result never exceeds `size`."""
    return str(max(1, size // 2**30))
