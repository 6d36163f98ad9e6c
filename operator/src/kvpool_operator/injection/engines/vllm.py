"""vLLM, alone or under Dynamo: the pool as a secondary tier of its offloading connector."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from kvpool_operator.api.annotations import ANNOTATION_ENGINE
from kvpool_operator.injection.command_line import Channel
from kvpool_operator.injection.connector import compact, escape_expansion, vllm_connector
from kvpool_operator.injection.engine_versions import is_known
from kvpool_operator.injection.host_memory import host_memory, shm_size
from kvpool_operator.injection.pod import add_volume, default_env, items, mount_at, private_volume_name, spec
from kvpool_operator.injection.skip import Skip, SkipReason
from kvpool_operator.k8s.merge_patch import merge_patch

if TYPE_CHECKING:
    from kvpool_operator.injection.command_line import ContainerInfo
    from kvpool_operator.injection.context import InjectionContext

__all__ = ["CONNECTOR_ARG", "CONNECTOR_ENV", "add_hashing", "add_shm", "inject", "pool_connector"]

SHM_VOLUME: Final = "kvpool-shm"
SHM_MOUNT: Final = "/dev/shm"  # noqa: S108  the engine's shared memory, not a temporary file of ours
CONNECTOR_ENV: Final = "KVPOOL_VLLM_KV_TRANSFER_CONFIG"
CONNECTOR_ARG: Final = "--kv-transfer-config"
HASH_ARG: Final = ("--prefix-caching-hash-algo", "sha256_cbor")


def inject(context: InjectionContext) -> list[str]:
    """Add connector, hashing and shared memory. Raises Skip(connector-present) if the user chose a connector."""
    if context.info.connector_present and not context.is_reinvocation:
        raise Skip(SkipReason.CONNECTOR_PRESENT, _advice(context))
    connector, warnings = pool_connector(context)
    if not context.info.connector_present:
        if context.info.channel is Channel.ARGS and not _is_doubtful(context.info):
            items(context.container, "args").extend([CONNECTOR_ARG, escape_expansion(compact(connector))])
        else:
            default_env(context.container, CONNECTOR_ENV, escape_expansion(compact(connector)))
    add_hashing(context)
    add_shm(context, connector)
    return warnings


def pool_connector(context: InjectionContext) -> tuple[dict[str, Any], list[str]]:
    """Return the connector configuration of this pod after the user's merge patch, and warnings."""
    wanted = context.settings.host_memory_bytes
    memory, warnings = host_memory(context.pod, context.container, wanted, SHM_MOUNT, engines=context.engines)
    connector = vllm_connector(block_tokens=context.settings.block_tokens, host_memory_bytes=memory)
    patched: dict[str, Any] = merge_patch(connector, context.request.connector_patch or {})
    return patched, warnings


def add_hashing(context: InjectionContext) -> None:
    """Use block hashes that are equal in every process. The default hash depends on the Python version."""
    default_env(context.container, "PYTHONHASHSEED", "0")
    if context.info.channel is Channel.ARGS and not context.info.hash_algo_present:
        items(context.container, "args").extend(HASH_ARG)


def add_shm(context: InjectionContext, connector: dict[str, Any]) -> None:
    """Enlarge /dev/shm, where vLLM keeps its host tier. The default of a container is 64 MiB.

    A mount of the user stays. Raises Skip(name-conflict) if it is read-only: vLLM would not start with a host tier.
    """
    mount = mount_at(context.container, SHM_MOUNT)
    if mount is not None and mount.get("readOnly"):
        raise Skip(
            SkipReason.NAME_CONFLICT,
            f"container {context.container.get('name')} mounts {SHM_MOUNT} read-only, and vLLM's host tier writes to "
            "it; make the mount writable or remove it",
        )
    if mount is not None or spec(context.pod).get("hostIPC"):
        return
    size = shm_size(connector, context.settings.host_memory_bytes)
    name = private_volume_name(context.pod, context.container, SHM_VOLUME)
    volume = {"name": name, "emptyDir": {"medium": "Memory", "sizeLimit": f"{-(-size // 2**20)}Mi"}}
    add_volume(context.pod, context.container, volume, SHM_MOUNT)


def _is_doubtful(info: ContainerInfo) -> bool:
    """Whether the version of vLLM might not start with this connector.

    Then the environment variable is used, whose plug-in checks the version first. Dynamo images contain a vLLM of an
    unknown version.
    """
    return info.launcher == "dynamo" or not is_known("vllm", info.version)


def _advice(context: InjectionContext) -> str:
    """Action for a user who configured a connector."""
    name, found = context.container.get("name"), context.info.connectors
    if "LMCacheMPConnector" in found:
        return (
            f"container {name} uses an LMCache server: label the pod of the server instead; the engine needs no change"
        )
    if "LMCacheConnectorV1" in found:
        return (
            f"container {name} runs LMCache in its own process; set {ANNOTATION_ENGINE}: lmcache to store its "
            "chunks in the pool (its keys do not include cache_salt)"
        )
    if "NixlConnector" in found and "MultiConnector" not in found:
        return (
            f"container {name} transfers prefills with NixlConnector; set {ANNOTATION_ENGINE}: vllm-pd to add the pool "
            "next to it (MultiConnector)"
        )
    return (
        f"container {name} already has a KV connector; remove it, "
        f'or set {ANNOTATION_ENGINE}: "none" to inject only the client and its socket'
    )
