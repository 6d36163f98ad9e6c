"""LMCache: its server (multiprocess mode) by an L2 adapter, its in-process mode by a remote storage plug-in.

The server's adapter is an environment variable, which the client's guard reads inside the server and appends to the
adapters of the user.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvpool_operator.api.annotations import ANNOTATION_ENGINE
from kvpool_operator.injection.connector import compact, escape_expansion
from kvpool_operator.injection.engine_versions import version_of_image
from kvpool_operator.injection.engines.vllm import add_hash_seed
from kvpool_operator.injection.pod import default_env, env_names
from kvpool_operator.injection.skip import Skip, SkipReason

if TYPE_CHECKING:
    from kvpool_operator.injection.command_line import ContainerInfo
    from kvpool_operator.injection.context import InjectionContext

__all__ = ["ADAPTER_ENV", "inject", "is_in_process"]

ADAPTER_ENV: Final = "KVPOOL_LMCACHE_L2"
ADAPTER: Final = {
    "type": "plugin",
    "module_path": "kvpool.engines.lmcache_mp",
    "class_name": "PoolL2Adapter",
    "adapter_params": {},
    "shared": True,
}
"""The client reads its settings from the environment."""
PLUGIN: Final = "kvpool"
REMOTE: Final = {
    f"remote_storage_plugin.{PLUGIN}.module_path": "kvpool.engines.lmcache_remote",
    f"remote_storage_plugin.{PLUGIN}.class_name": "PoolConnectorAdapter",
}
_PLUGINS_ENV, _EXTRA_ENV = "LMCACHE_REMOTE_STORAGE_PLUGINS", "LMCACHE_EXTRA_CONFIG"
_WITHOUT_BUFFER: Final = frozenset(
    {
        "LMCACHE_ENABLE_PD",
        "LMCACHE_ENABLE_XPYD",
        "LMCACHE_ENABLE_NIXL",
        "LMCACHE_ENABLE_SCHEDULER_BYPASS_LOOKUP",
    }
)
"""Modes in which LMCache has no buffer in host memory, and does not start with a remote storage (0.5.6,
storage_backend/__init__.py)."""
_FIRST: Final = (0, 5)
_BUFFER_SIZE: Final = "LMCACHE_MAX_LOCAL_CPU_SIZE"
_USER_SETTINGS: Final = frozenset({"LMCACHE_CONFIG_FILE", "LMCACHE_REMOTE_URL", _PLUGINS_ENV, _EXTRA_ENV})


def is_in_process(info: ContainerInfo) -> bool:
    """Whether vLLM runs LMCache in its own process."""
    return info.engine == "vllm" and "LMCacheConnectorV1" in info.mentioned


def inject(context: InjectionContext) -> list[str]:
    """Add a tier to LMCache, in its server or in the process of vLLM."""
    return _in_process(context) if is_in_process(context.info) else _server(context)


def _server(context: InjectionContext) -> list[str]:
    name = context.container.get("name")
    if context.info.engine not in ("lmcache", ""):
        raise Skip(
            SkipReason.UNSUPPORTED_ENGINE,
            f"container {name} runs neither `lmcache server` nor a vLLM with LMCacheConnectorV1",
        )
    default_env(context.container, ADAPTER_ENV, escape_expansion(compact(ADAPTER)))
    return add_hash_seed(context)


def _in_process(context: InjectionContext) -> list[str]:
    if context.is_reinvocation:
        return []
    present = sorted(_USER_SETTINGS & env_names(context.container))
    if present:
        raise Skip(
            SkipReason.CONNECTOR_PRESENT,
            f"container {context.container.get('name')} configures LMCache by {', '.join(present)}; add "
            f"remote_storage_plugins: [{PLUGIN}] there and, in extra_config, its module and class "
            "(docs/how-to/engines/lmcache.md)",
        )
    _check_buffer(context)
    _check_release(context)
    default_env(context.container, _PLUGINS_ENV, PLUGIN)
    default_env(context.container, _EXTRA_ENV, escape_expansion(compact(REMOTE)))
    default_env(context.container, "LMCACHE_PRE_CACHING_HASH_ALGORITHM", "sha256_cbor")
    return [
        "LMCache's in-process keys do not include cache_salt: salts of one namespace share blocks",
        *add_hash_seed(context),
    ]


def _check_release(context: InjectionContext) -> None:
    """Raise Skip for a release by the image tag whose handling of a failed remote storage was not examined."""
    name, version = (
        context.container.get("name"),
        version_of_image("lmcache", str(context.container.get("image") or "")),
    )
    if context.request.engine == "auto" and version is not None and version < _FIRST:
        raise Skip(
            SkipReason.UNSUPPORTED_ENGINE,
            f"container {name} runs LMCache {'.'.join(map(str, version))} by its image tag, which is not tested inside "
            f"vLLM; set {ANNOTATION_ENGINE}: lmcache to try it",
        )


def _check_buffer(context: InjectionContext) -> None:
    """Raise Skip if LMCache would not start with a remote storage, because it has no buffer in host memory."""
    values = {str(e.get("name")): e.get("value") for e in context.container.get("env") or []}
    modes = sorted(n for n in _WITHOUT_BUFFER & values.keys() if str(values[n]).lower() not in ("false", "0", "no", ""))
    if not modes and _BUFFER_SIZE in values and not _is_positive(values[_BUFFER_SIZE]):
        modes = [_BUFFER_SIZE]
    if modes:
        raise Skip(
            SkipReason.CONNECTOR_PRESENT,
            f"container {context.container.get('name')} sets {', '.join(modes)}: without a buffer in host memory, "
            "LMCache does not start with a remote storage such as the pool",
        )


def _is_positive(value: object) -> bool:
    try:
        return float(str(value)) > 0
    except ValueError:
        return False
