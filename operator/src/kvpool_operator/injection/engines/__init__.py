"""Injectors of the engine kinds: one module for each, and the table that dispatches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvpool_operator.injection.engines import dynamo, lmcache, sglang, vllm

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpool_operator.injection.command_line import ContainerInfo
    from kvpool_operator.injection.context import InjectionContext

__all__ = ["HOST_TIER_ENGINES", "INJECTORS", "engine_kind", "match_score"]


def _client_only(_context: InjectionContext) -> list[str]:
    return []


INJECTORS: Final[dict[str, Callable[[InjectionContext], list[str]]]] = {
    "vllm": vllm.inject,
    "vllm-pd": vllm.inject,
    "lmcache": lmcache.inject,
    "sglang": sglang.inject,
    "dynamo": dynamo.inject,
    "none": _client_only,
}
"""Injector by engine kind: modifies the container of the context and returns warnings, or raises Skip."""

HOST_TIER_ENGINES: Final = frozenset({"vllm", "vllm-pd", "dynamo"})
"""Engine kinds whose host tier has a size that the webhook sets."""


def engine_kind(requested: str, info: ContainerInfo) -> str:
    """Return a key of INJECTORS, or an empty string if the engine is `auto` and not recognized."""
    if requested != "auto":
        return requested
    if info.kvbm:
        return "dynamo"
    return "lmcache" if "LMCacheConnectorV1" in info.connectors else info.engine


def match_score(requested: str, info: ContainerInfo) -> int:
    """Score how well a container matches the requested engine kind; 0: no match."""
    if not info.engine:
        return 0
    if requested == "auto":
        # an LMCache server takes precedence over the engine next to it
        return 3 if info.engine == "lmcache" else 1 if info.connectors else 2
    if requested in ("vllm", "vllm-pd"):
        return 2 * (info.engine == "vllm")
    if requested == "lmcache":
        return 3 * (info.engine == "lmcache") or 2 * lmcache.is_in_process(info)
    if requested == "dynamo":
        return 1 + (info.launcher == "dynamo") + 2 * info.kvbm
    return 2 * (info.engine == requested)
