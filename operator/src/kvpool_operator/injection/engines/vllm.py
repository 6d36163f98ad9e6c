"""vLLM, alone or under Dynamo: the pool as a secondary tier of its own offloading (kvpool.engines.vllm:PoolTier)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from kvpool_operator.api.annotations import ANNOTATION_ENGINE
from kvpool_operator.injection.command_line import Channel
from kvpool_operator.injection.connector import compact, literal, vllm_connector
from kvpool_operator.injection.engine_versions import is_known
from kvpool_operator.injection.host_memory import host_memory, shm_size
from kvpool_operator.injection.pod import add_volume, default_env, items, mount_at, spec
from kvpool_operator.injection.skip import Skip, SkipReason
from kvpool_operator.k8s.merge_patch import merge_patch

if TYPE_CHECKING:
    from kvpool_operator.injection.command_line import ContainerInfo
    from kvpool_operator.injection.context import InjectionContext

__all__ = ["CONNECTOR_ARG", "CONNECTOR_ENV", "add", "add_hashing", "add_shm", "pool_connector"]

SHM_VOLUME: Final = "kvpool-shm"
SHM_MOUNT: Final = "/dev/shm"  # noqa: S108  the engine's shared memory, not a temporary file of ours
CONNECTOR_ENV: Final = "KVPOOL_VLLM_KV_TRANSFER_CONFIG"
CONNECTOR_ARG: Final = "--kv-transfer-config"
HASH_ARG: Final = ("--prefix-caching-hash-algo", "sha256_cbor")


def add(target: InjectionContext) -> list[str]:
    """Connector, hashing and shared memory; Skip(connector-present) where the user chose a connector."""
    if target.reading.connector_present and not target.again:
        raise Skip(SkipReason.CONNECTOR_PRESENT, _instead(target))
    connector, warnings = pool_connector(target)
    if not target.reading.connector_present:
        if target.reading.channel is Channel.ARGS and not _is_doubtful(target.reading):
            items(target.container, "args").extend([CONNECTOR_ARG, literal(compact(connector))])
        else:
            default_env(target.container, CONNECTOR_ENV, literal(compact(connector)))
    add_hashing(target)
    add_shm(target, connector)
    return warnings


def pool_connector(target: InjectionContext) -> tuple[dict[str, Any], list[str]]:
    """The connector's configuration for this pod, after the user's merge patch; and warnings."""
    wanted = target.injection.host_memory_bytes
    memory, warnings = host_memory(target.pod, target.container, wanted, SHM_MOUNT)
    connector = vllm_connector(block_tokens=target.injection.block_tokens, host_memory_bytes=memory)
    patched: dict[str, Any] = merge_patch(connector, target.wishes.connector_patch or {})
    return patched, warnings


def add_hashing(target: InjectionContext) -> None:
    """Hashes that are equal in every process: the default hashes pickled bytes, which differ between Pythons."""
    default_env(target.container, "PYTHONHASHSEED", "0")
    if target.reading.channel is Channel.ARGS and not target.reading.hash_algo_present:
        items(target.container, "args").extend(HASH_ARG)


def add_shm(target: InjectionContext, connector: dict[str, Any]) -> None:
    """vLLM keeps its host tier in /dev/shm; a container's default there is 64 MiB."""
    if mount_at(target.container, SHM_MOUNT) is not None or spec(target.pod).get("hostIPC"):
        return
    size = shm_size(connector, target.injection.host_memory_bytes)
    volume = {"name": SHM_VOLUME, "emptyDir": {"medium": "Memory", "sizeLimit": f"{-(-size // 2**20)}Mi"}}
    add_volume(target.pod, target.container, volume, SHM_MOUNT)


def _is_doubtful(reading: ContainerInfo) -> bool:
    """Whether vLLM may be of a version that would not start with our connector.

    Then the plug-in behind the variable looks first. Dynamo brings a vLLM of its own choice.
    """
    return reading.launcher == "dynamo" or not is_known("vllm", reading.version)


def _instead(target: InjectionContext) -> str:
    """What a user with a connector of their own can do."""
    name, found = target.container.get("name"), target.reading.connectors
    if "LMCacheMPConnector" in found:
        return f"container {name} uses an LMCache server: label the server's pod instead, the engine stays as it is"
    if "LMCacheConnectorV1" in found:
        return (
            f"container {name} runs LMCache in its own process; set {ANNOTATION_ENGINE}: lmcache to have that keep its "
            "chunks in the pool (its keys do not tell cache_salt)"
        )
    if "NixlConnector" in found and "MultiConnector" not in found:
        return (
            f"container {name} hands prefills over by NixlConnector; set {ANNOTATION_ENGINE}: vllm-pd to put the pool "
            "beside it (MultiConnector)"
        )
    return (
        f"container {name} already chooses a KV connector; remove it, "
        f'or set {ANNOTATION_ENGINE}: "none" to get only the client and its socket'
    )
