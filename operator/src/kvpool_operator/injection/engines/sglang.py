"""SGLang, alone or under Dynamo: the pool as the storage backend of its hierarchical cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvpool_operator.injection.connector import compact
from kvpool_operator.injection.flags import add_flags, has_flag, value_of
from kvpool_operator.injection.skip import Skip, SkipReason

if TYPE_CHECKING:
    from kvpool_operator.injection.context import InjectionContext

__all__ = ["BACKEND", "inject"]

BACKEND: Final = {
    "backend_name": "kvpool",
    "module_path": "kvpool.engines.sglang",
    "class_name": "PoolHiCache",
    "interface_v1": 1,
}
"""The client reads its settings from the environment."""
_STORAGE: Final = "--hicache-storage-backend"
_EXTRA: Final = "--hicache-storage-backend-extra-config"
_DEFAULTS: Final = (
    ("--page-size", "64"),
    ("--hicache-mem-layout", "page_first"),
    ("--hicache-storage-prefetch-policy", "timeout"),  # bounds the time that a prefill waits for the storage
)
_OTHERS: Final = ("--enable-lmcache", "--enable-unified-cache-external-linker")
_KNOWN: Final = frozenset(
    {_STORAGE, _EXTRA, "--enable-hierarchical-cache", "--enable-hicache", *_OTHERS, *(f for f, _ in _DEFAULTS)}
)


def inject(context: InjectionContext) -> list[str]:
    """Add the flags that are absent. SGLang decides the size of the host tier, because it knows its limits."""
    argv = [*context.argv, *context.info.shell_text.split()]

    def has_option(flag: str) -> bool:
        return has_flag(argv, flag, _KNOWN)

    if context.is_reinvocation and (has_option(_STORAGE) or not context.info.engine or context.info.shell_text):
        return []
    _check_supported(context, argv)
    flags = (
        []
        if has_option("--enable-hierarchical-cache") or has_option("--enable-hicache")
        else ["--enable-hierarchical-cache"]
    )
    for flag, value in _DEFAULTS:
        if not has_option(flag):
            flags += [flag, value]
    flags += [_STORAGE, "dynamic", _EXTRA, compact(BACKEND)]
    return add_flags(context.container, context.info, flags, requested=context.request.engine == "sglang")


def _check_supported(context: InjectionContext, argv: list[str]) -> None:
    """Raise Skip if the user chose another tier, or if SGLang would not start with one."""
    name = context.container.get("name")
    other = next((f for f in (_STORAGE, *_OTHERS, _EXTRA) if has_flag(argv, f, _KNOWN)), None)
    if other:
        raise Skip(SkipReason.CONNECTOR_PRESENT, f"container {name} already has {other}; remove it to use the pool")
    if has_flag(argv, "--disable-radix-cache"):
        raise Skip(
            SkipReason.UNSUPPORTED_ENGINE,
            f"container {name} has --disable-radix-cache: caching is disabled",
        )
    mode = value_of(argv, "--disaggregation-mode")
    if mode is not None and mode[1] == "decode":
        raise Skip(
            SkipReason.UNSUPPORTED_ENGINE,
            f"container {name} is a decode engine: SGLang's hierarchical cache runs in the prefill pods; label those",
        )
