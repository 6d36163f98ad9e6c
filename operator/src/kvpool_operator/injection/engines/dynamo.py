"""NVIDIA Dynamo's block manager (KVBM): room on the node, and nothing that is shared.

Its wheel has tiers for host memory and a private file, and no way in for a remote store
(docs/how-to/engines/dynamo.md). So an engine gets sizes and a directory; condition BlocksShareable says that its
blocks are not shared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from kvpool_operator.injection.command_line import Channel
from kvpool_operator.injection.connector import compact, literal
from kvpool_operator.injection.engines.vllm import CONNECTOR_ARG
from kvpool_operator.injection.host_memory import host_memory
from kvpool_operator.injection.pod import add_volume, default_env, env_names, items
from kvpool_operator.injection.skip import Skip, SkipReason
from kvpool_operator.k8s.merge_patch import merge_patch

if TYPE_CHECKING:
    from kvpool_operator.injection.context import InjectionContext

__all__ = ["VOLUME", "add"]

VOLUME: Final = "kvpool-kvbm"
MOUNT: Final = "/var/lib/kvpool-kvbm"
CONNECTOR: Final = {
    "kv_connector": "DynamoConnector",
    "kv_connector_module_path": "kvbm.vllm_integration.connector",
    "kv_role": "kv_both",
}
_HOST: Final = ("DYN_KVBM_CPU_CACHE_GB", "DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS")
_DISK: Final = ("DYN_KVBM_DISK_CACHE_GB", "DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS", "DYN_KVBM_DISK_CACHE_DIR")


def add(target: InjectionContext) -> list[str]:
    """Sizes and directory where the user set none; the connector too, for a vLLM that has none."""
    container, reading, injection = target.container, target.reading, target.injection
    if reading.connector_present and not reading.kvbm:
        raise Skip(
            SkipReason.CONNECTOR_PRESENT,
            f"container {container.get('name')} already chooses a KV connector that is not Dynamo's; it stays",
        )
    if reading.engine == "vllm" and not reading.connector_present:
        _add_connector(target)
    mine = env_names(container)
    memory, warnings = host_memory(target.pod, container, injection.kvbm_host_bytes, "")
    if not mine & set(_HOST):
        default_env(container, _HOST[0], _gib(memory))
    if not mine & set(_DISK) and injection.kvbm_disk_bytes:
        # a private file of that size is made there; past the limit the kubelet would evict the pod
        limit = f"{-(-injection.kvbm_disk_bytes // 2**20) + 1024}Mi"
        add_volume(target.pod, container, {"name": VOLUME, "emptyDir": {"sizeLimit": limit}}, MOUNT)
        default_env(container, _DISK[0], _gib(injection.kvbm_disk_bytes))
        default_env(container, _DISK[2], MOUNT)
    return [*warnings, "KVBM has no remote tier: blocks stay on their node, and no other engine finds them"]


def _add_connector(target: InjectionContext) -> None:
    if target.reading.channel is not Channel.ARGS:
        raise Skip(
            SkipReason.COMMAND_NOT_EXTENDABLE,
            f"write {CONNECTOR_ARG} with DynamoConnector into the command line of {target.container.get('name')}",
        )
    connector: dict[str, Any] = merge_patch(dict(CONNECTOR), target.wishes.connector_patch or {})
    items(target.container, "args").extend([CONNECTOR_ARG, literal(compact(connector))])


def _gib(size: int) -> str:
    """Whole GiB, at least one; KVBM reads its GB as 10**9 or as 2**30, so this is never more than `size`."""
    return str(max(1, size // 2**30))
