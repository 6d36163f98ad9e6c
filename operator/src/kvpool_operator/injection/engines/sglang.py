"""SGLang, alone or under Dynamo: the pool as the storage backend of its hierarchical cache.

The configuration is an environment variable. The client's guard reads it inside the engine, checks that this SGLang has
the interface, and keeps the arguments that the user set.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from kvpool_operator.injection.connector import compact, escape_expansion
from kvpool_operator.injection.flags import has_flag, value_of
from kvpool_operator.injection.pod import default_env
from kvpool_operator.injection.skip import Skip, SkipReason

if TYPE_CHECKING:
    from kvpool_operator.injection.context import InjectionContext

__all__ = ["SETTINGS_ENV", "inject"]

SETTINGS_ENV: Final = "KVPOOL_SGLANG_HICACHE"
SETTINGS: Final[dict[str, Any]] = {
    "page_size": 64,
    "hicache_mem_layout": "page_first",
    "hicache_storage_prefetch_policy": "timeout",  # bounds the time that a prefill waits for the storage
    "hicache_storage_backend_extra_config": {
        "backend_name": "kvpool",
        "module_path": "kvpool.engines.sglang",
        "class_name": "PoolHiCache",
        "interface_v1": 1,
    },
}
"""Names of SGLang's server arguments. SGLang decides the size of the host tier, because it knows its limits."""
_STORAGE: Final = "--hicache-storage-backend"
_EXTRA: Final = "--hicache-storage-backend-extra-config"
_OTHERS: Final = ("--enable-lmcache", "--enable-unified-cache-external-linker")
_KNOWN: Final = frozenset(
    {_STORAGE, _EXTRA, "--enable-hierarchical-cache", "--enable-hicache", "--hicache-mem-layout", *_OTHERS}
)


def inject(context: InjectionContext) -> list[str]:
    """Add the variable. Raises Skip if plain arguments choose another storage, or disable what the pool needs."""
    if not context.is_reinvocation:
        _check_supported(context)
    default_env(context.container, SETTINGS_ENV, escape_expansion(compact(SETTINGS)))
    return []


def _check_supported(context: InjectionContext) -> None:
    name, argv = context.container.get("name"), context.info.argv
    other = next((f for f in (_STORAGE, *_OTHERS, _EXTRA) if has_flag(argv, f, _KNOWN)), None)
    is_ours = "kvpool" in (value_of(argv, _EXTRA) or "")
    if other and not is_ours:
        raise Skip(SkipReason.CONNECTOR_PRESENT, f"container {name} already has {other}; remove it to use the pool")
    if has_flag(argv, "--disable-radix-cache"):
        raise Skip(
            SkipReason.UNSUPPORTED_ENGINE,
            f"container {name} has --disable-radix-cache: caching is disabled",
        )
    if value_of(argv, "--disaggregation-mode") == "decode":
        raise Skip(
            SkipReason.UNSUPPORTED_ENGINE,
            f"container {name} is a decode engine: SGLang's hierarchical cache runs in the prefill pods; label those",
        )
