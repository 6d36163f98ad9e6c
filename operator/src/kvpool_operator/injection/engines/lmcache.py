"""LMCache: its server (multiprocess mode) by an L2 adapter, its in-process mode by a remote storage plug-in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvpool_operator.injection.connector import compact, literal
from kvpool_operator.injection.flags import add_flags, has_flag
from kvpool_operator.injection.pod import default_env, env_names
from kvpool_operator.injection.skip import Skip, SkipReason

if TYPE_CHECKING:
    from kvpool_operator.injection.command_line import ContainerInfo
    from kvpool_operator.injection.context import InjectionContext

__all__ = ["add", "is_in_process"]

ADAPTER: Final = {
    "type": "plugin",
    "module_path": "kvpool.engines.lmcache_mp",
    "class_name": "PoolL2Adapter",
    "adapter_params": {},
    "shared": True,
}
"""The client's own settings come by its environment."""
PLUGIN: Final = "kvpool"
REMOTE: Final = {
    f"remote_storage_plugin.{PLUGIN}.module_path": "kvpool.engines.lmcache_remote",
    f"remote_storage_plugin.{PLUGIN}.class_name": "PoolConnectorAdapter",
}
_PLUGINS_ENV, _EXTRA_ENV = "LMCACHE_REMOTE_STORAGE_PLUGINS", "LMCACHE_EXTRA_CONFIG"
_THEIRS: Final = frozenset(
    {"LMCACHE_CONFIG_FILE", "LMCACHE_REMOTE_URL", "LMCACHE_REMOTE_STORAGE_PLUGINS", "LMCACHE_EXTRA_CONFIG"}
)


def is_in_process(reading: ContainerInfo) -> bool:
    """Whether a vLLM runs LMCache in its own process."""
    return reading.engine == "vllm" and "LMCacheConnectorV1" in reading.connectors


def add(target: InjectionContext) -> list[str]:
    """One more tier for LMCache, wherever it runs."""
    return _in_process(target) if is_in_process(target.reading) else _server(target)


def _server(target: InjectionContext) -> list[str]:
    name = target.container.get("name")
    if target.reading.engine not in ("lmcache", ""):
        raise Skip(
            SkipReason.UNSUPPORTED_ENGINE,
            f"container {name} runs neither `lmcache server` nor a vLLM with LMCacheConnectorV1",
        )
    words = [*target.words, *target.reading.shell_text.split()]
    if has_flag(words, "--l2-adapter"):
        if target.again:
            return []
        raise Skip(SkipReason.CONNECTOR_PRESENT, f"container {name} already has an --l2-adapter; it stays")
    flags = ["--l2-adapter", compact(ADAPTER)]
    if not has_flag(words, "--l2-prefetch-policy"):
        flags += ["--l2-prefetch-policy", "retain"]  # what was fetched stays in the server's memory
    default_env(target.container, "PYTHONHASHSEED", "0")
    return add_flags(target.container, target.reading, flags, asked=target.wishes.engine == "lmcache")


def _in_process(target: InjectionContext) -> list[str]:
    if target.again:
        return []
    present = sorted(_THEIRS & env_names(target.container))
    if present:
        raise Skip(
            SkipReason.CONNECTOR_PRESENT,
            f"container {target.container.get('name')} configures LMCache by {', '.join(present)}; write there "
            f"remote_storage_plugins: [{PLUGIN}] and, in extra_config, its module and class "
            "(docs/how-to/engines/lmcache.md)",
        )
    default_env(target.container, _PLUGINS_ENV, PLUGIN)
    default_env(target.container, _EXTRA_ENV, literal(compact(REMOTE)))
    default_env(target.container, "LMCACHE_PRE_CACHING_HASH_ALGORITHM", "sha256_cbor")
    default_env(target.container, "PYTHONHASHSEED", "0")
    return ["LMCache's in-process keys do not tell cache_salt: salts of one namespace share blocks"]
