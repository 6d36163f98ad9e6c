"""One module for each family of engines, and the table that dispatches. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvpool_operator.injection.engines import dynamo, lmcache, sglang, vllm
from kvpool_operator.injection.engines import vllm_pd as prefill_decode

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpool_operator.injection.command_line import ContainerInfo
    from kvpool_operator.injection.context import InjectionContext

__all__ = ["FAMILIES", "family_of", "suits"]


def _nothing(_target: InjectionContext) -> list[str]:
    return []


FAMILIES: Final[dict[str, Callable[[InjectionContext], list[str]]]] = {
    "vllm": vllm.add,
    "vllm-pd": prefill_decode.add,
    "lmcache": lmcache.add,
    "sglang": sglang.add,
    "dynamo": dynamo.add,
    "none": _nothing,
}
"""By the value of the annotation kvpool.dev/engine: changes the container of a target, gives the warnings; or Skip."""


def family_of(asked: str, reading: ContainerInfo) -> str:
    """A key of FAMILIES. Empty for `auto` where no engine was recognised."""
    if asked != "auto":
        return asked
    return "dynamo" if reading.kvbm else reading.engine


def suits(asked: str, reading: ContainerInfo) -> int:
    """How well a container fits what was asked for, 0 for not at all: the best one is the engine's."""
    if not reading.engine:
        return 0
    if asked == "auto":
        # an LMCache server is the one to be told of the pool, whatever its engine beside it says of itself
        return 3 if reading.engine == "lmcache" else 1 if reading.connector_present else 2
    if asked in ("vllm", "vllm-pd"):
        return 2 * (reading.engine == "vllm")
    if asked == "lmcache":
        return 3 * (reading.engine == "lmcache") or 2 * lmcache.is_in_process(reading)
    if asked == "dynamo":
        return 1 + (reading.launcher == "dynamo") + 2 * reading.kvbm
    return 2 * (reading.engine == asked)
