"""SGLang, alone or under Dynamo: the pool as the storage backend of its hierarchical cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvpool_operator.injection.connector import compact
from kvpool_operator.injection.flags import add_flags, has_flag, value_of
from kvpool_operator.injection.skip import Skip, SkipReason

if TYPE_CHECKING:
    from kvpool_operator.injection.context import InjectionContext

__all__ = ["BACKEND", "add"]

BACKEND: Final = {
    "backend_name": "kvpool",
    "module_path": "kvpool.engines.sglang",
    "class_name": "PoolHiCache",
    "interface_v1": 1,
}
"""The client's own settings come by its environment."""
_STORAGE: Final = "--hicache-storage-backend"
_EXTRA: Final = "--hicache-storage-backend-extra-config"
_DEFAULTS: Final = (
    ("--page-size", "64"),
    ("--hicache-mem-layout", "page_first"),
    ("--hicache-storage-prefetch-policy", "timeout"),  # a prefill never waits longer than SGLang's own bound for it
)
_OTHERS: Final = ("--enable-lmcache", "--enable-unified-cache-external-linker")
_KNOWN: Final = frozenset(
    {_STORAGE, _EXTRA, "--enable-hierarchical-cache", "--enable-hicache", *_OTHERS, *(f for f, _ in _DEFAULTS)}
)


def add(target: InjectionContext) -> list[str]:
    """The flags that are not there. How large the host tier is stays SGLang's decision, which knows its limits."""
    words = [*target.words, *target.reading.shell_text.split()]

    def there(flag: str) -> bool:
        return has_flag(words, flag, _KNOWN)

    if target.again and (there(_STORAGE) or not target.reading.engine or target.reading.shell_text):
        return []
    _refuse(target, words)
    flags = [] if there("--enable-hierarchical-cache") or there("--enable-hicache") else ["--enable-hierarchical-cache"]
    for flag, value in _DEFAULTS:
        if not there(flag):
            flags += [flag, value]
    flags += [_STORAGE, "dynamic", _EXTRA, compact(BACKEND)]
    return add_flags(target.container, target.reading, flags, asked=target.wishes.engine == "sglang")


def _refuse(target: InjectionContext, words: list[str]) -> None:
    """Skip where the user chose another tier, or where SGLang would not start with one."""
    name = target.container.get("name")
    other = next((f for f in (_STORAGE, *_OTHERS, _EXTRA) if has_flag(words, f, _KNOWN)), None)
    if other:
        raise Skip(SkipReason.CONNECTOR_PRESENT, f"container {name} already has {other}; remove it to get the pool")
    if has_flag(words, "--disable-radix-cache"):
        raise Skip(SkipReason.UNSUPPORTED_ENGINE, f"container {name} has --disable-radix-cache: nothing is cached")
    mode = value_of(words, "--disaggregation-mode")
    if mode is not None and mode[1] == "decode":
        raise Skip(
            SkipReason.UNSUPPORTED_ENGINE,
            f"container {name} only decodes: SGLang's hierarchical cache belongs to the prefill pods, label those",
        )
