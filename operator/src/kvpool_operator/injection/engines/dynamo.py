"""NVIDIA Dynamo's block manager (KVBM): tiers on the node, without sharing.

Its wheel has tiers for host memory and a private file, and no interface for a remote store
(docs/how-to/engines/dynamo.md). The injector sets sizes and a directory; the condition BlocksShareable reports that the
blocks are not shared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvpool_operator.injection.host_memory import host_memory
from kvpool_operator.injection.pod import add_volume, default_env, env_names, private_volume_name
from kvpool_operator.injection.skip import Skip, SkipReason

if TYPE_CHECKING:
    from kvpool_operator.injection.context import InjectionContext

__all__ = ["VOLUME", "inject"]

VOLUME: Final = "kvpool-kvbm"
MOUNT: Final = "/var/lib/kvpool-kvbm"
_HOST: Final = ("DYN_KVBM_CPU_CACHE_GB", "DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS")
_DISK: Final = ("DYN_KVBM_DISK_CACHE_GB", "DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS", "DYN_KVBM_DISK_CACHE_DIR")


def inject(context: InjectionContext) -> list[str]:
    """Set sizes and directory that the user has not set. Raises Skip for a vLLM without KVBM's connector."""
    container, info, settings = context.container, context.info, context.settings
    if info.engine == "vllm" and not info.kvbm and not context.is_reinvocation:
        raise Skip(
            SkipReason.CONNECTOR_PRESENT if info.connectors else SkipReason.COMMAND_NOT_EXTENDABLE,
            f"container {container.get('name')} does not use KVBM, and command lines are not changed; add "
            "--kv-transfer-config with DynamoConnector to use it",
        )
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


def _gib(size: int) -> str:
    """Return whole GiB, at least one. KVBM reads GB as 10**9 or 2**30, so the result never exceeds `size`."""
    return str(max(1, size // 2**30))
