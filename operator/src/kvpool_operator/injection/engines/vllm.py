"""vLLM, alone or under Dynamo: the pool as a secondary tier of its offloading connector.

The configuration is an environment variable. The client's plug-in reads it inside the engine, checks that this vLLM has
the interface, and combines the connector with the one that the user configured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from kvpool_operator.api.annotations import ANNOTATION_ENGINE
from kvpool_operator.injection.connector import compact, escape_expansion, vllm_connector
from kvpool_operator.injection.host_memory import host_memory, shm_size
from kvpool_operator.injection.pod import (
    add_volume,
    default_env,
    find_by_name,
    items,
    mount_at,
    private_volume_name,
    spec,
)
from kvpool_operator.injection.skip import Skip, SkipReason
from kvpool_operator.k8s.merge_patch import merge_patch

if TYPE_CHECKING:
    from kvpool_operator.injection.context import InjectionContext

__all__ = ["CONNECTOR_ENV", "add_hash_seed", "inject"]

SHM_VOLUME: Final = "kvpool-shm"
SHM_MOUNT: Final = "/dev/shm"  # noqa: S108  the engine's shared memory, not a temporary file of ours
CONNECTOR_ENV: Final = "KVPOOL_VLLM_KV_TRANSFER_CONFIG"
PLUGINS_ENV: Final = "VLLM_PLUGINS"
PLUGIN: Final = "kvpool"
"""Name of the entry point of the client's plug-in."""
SEED_ENV: Final = "PYTHONHASHSEED"
TRANSFERS: Final = frozenset({"NixlConnector", "NixlPullConnector", "NixlPushConnector"})
COMBINABLE: Final = TRANSFERS | {"OffloadingConnector", "MultiConnector"}
"""Connectors of the user that the plug-in can combine with the pool's."""
SPECS: Final = frozenset({"CPUOffloadingSpec", "TieringOffloadingSpec"})
"""Specs of the user's OffloadingConnector to which the plug-in can append the pool's tier."""


def inject(context: InjectionContext) -> list[str]:
    """Add the connector's variable, the hash seed, the plug-in's name and shared memory.

    Raises Skip(connector-present) if plain arguments choose a connector that cannot be combined.
    """
    if not context.is_reinvocation:
        _check_connector(context)
    connector, warnings = _pool_connector(context)
    default_env(context.container, CONNECTOR_ENV, escape_expansion(compact(connector)))
    warnings += add_hash_seed(context) + _enable_plugin(context.container)
    _add_shm(context, connector)
    return warnings


def add_hash_seed(context: InjectionContext) -> list[str]:
    """Set PYTHONHASHSEED, which block hashes and fingerprints include, and return warnings about the user's value."""
    entry = find_by_name(context.container.get("env"), SEED_ENV)
    default_env(context.container, SEED_ENV, "0")
    if entry is None or (str(entry.get("value") or "").isascii() and str(entry.get("value") or "").isdigit()):
        return []
    found = "is read from a reference" if "valueFrom" in entry else "is not a number"
    return [
        f"{SEED_ENV} of container {context.container.get('name')} {found}: the engine shares blocks only with engines "
        "that have the same value; set one number on all engines"
    ]


def _pool_connector(context: InjectionContext) -> tuple[dict[str, Any], list[str]]:
    """Return the connector configuration of this pod after the user's merge patch, and warnings."""
    wanted = context.settings.host_memory_bytes
    memory, warnings = host_memory(context.pod, context.container, wanted, SHM_MOUNT, engines=context.engines)
    connector = vllm_connector(block_tokens=context.settings.block_tokens, host_memory_bytes=memory)
    patched: dict[str, Any] = merge_patch(connector, context.request.connector_patch or {})
    return patched, warnings


def _enable_plugin(container: dict[str, Any]) -> list[str]:
    """Append the plug-in to the user's list of plug-ins, which is otherwise all that vLLM loads."""
    entry = find_by_name(items(container, "env"), PLUGINS_ENV)
    if entry is None:
        return []
    if "valueFrom" in entry:
        return [
            f"{PLUGINS_ENV} of container {container.get('name')} is read from a reference: without {PLUGIN} in it, "
            "vLLM does not load the plug-in, and the engine runs without the pool"
        ]
    names = [n for n in str(entry.get("value") or "").split(",") if n]
    if PLUGIN not in names:
        entry["value"] = ",".join([*names, PLUGIN])
    return []


def _add_shm(context: InjectionContext, connector: dict[str, Any]) -> None:
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
    size = max(shm_size(connector, context.settings.host_memory_bytes), shm_size({}, context.info.tier_bytes))
    name = private_volume_name(context.pod, context.container, SHM_VOLUME)
    volume = {"name": name, "emptyDir": {"medium": "Memory", "sizeLimit": f"{-(-size // 2**20)}Mi"}}
    add_volume(context.pod, context.container, volume, SHM_MOUNT)


def _check_connector(context: InjectionContext) -> None:
    info, name = context.info, context.container.get("name")
    others = sorted(info.connectors - COMBINABLE)
    if others:
        raise Skip(SkipReason.CONNECTOR_PRESENT, _advice(context, others))
    specs = sorted(info.offloading_specs - SPECS)
    if specs:
        raise Skip(
            SkipReason.CONNECTOR_PRESENT,
            f"container {name} offloads with {', '.join(specs)}, which has no tiers; remove it to use the pool",
        )
    if info.launcher == "dynamo" and info.connectors & TRANSFERS:
        raise Skip(
            SkipReason.CONNECTOR_PRESENT,
            f"container {name} transfers prefills under Dynamo, which needs NixlConnector as the only connector",
        )


def _advice(context: InjectionContext, others: list[str]) -> str:
    """Action for a user whose connector cannot be combined with the pool's."""
    name = context.container.get("name")
    if "LMCacheMPConnector" in others:
        return (
            f"container {name} uses an LMCache server: label the pod of the server instead; the engine needs no change"
        )
    if "LMCacheConnectorV1" in others:
        return (
            f"container {name} runs LMCache in its own process; set {ANNOTATION_ENGINE}: lmcache to store its "
            "chunks in the pool (its keys do not include cache_salt)"
        )
    return (
        f"container {name} has the KV connector {', '.join(others)}, which cannot be combined with the pool; remove "
        f'it, or set {ANNOTATION_ENGINE}: "none" to inject only the client and its socket'
    )
