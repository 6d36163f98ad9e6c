"""Suitability of a recognized engine: what certainly cannot use the pool, and what perhaps cannot."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from kvpool_operator.api.annotations import ANNOTATION_CONTAINER, ANNOTATION_ENGINE, CLIENTLESS_ENGINES
from kvpool_operator.injection.engine_versions import precedes_interface, untested
from kvpool_operator.injection.skip import Skip, SkipReason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpool_operator.injection.command_line import ContainerInfo

__all__ = ["doubts", "no_engine", "refuse_unsuitable"]

_WITHOUT_TIERS: Final = CLIENTLESS_ENGINES | {"none"}
"""Engine kinds that are injected without a tier of the pool inside the engine."""


def refuse_unsuitable(container: dict[str, Any], kind: str, info: ContainerInfo, *, is_decided: bool) -> None:
    """Raise Skip for engines, accelerators and releases that cannot use the pool.

    `is_decided`: the user, or an earlier invocation, chose the engine kind. That overrides what the image and the
    resources suggest.
    """
    name = container.get("name")
    if kind == "trtllm":
        raise Skip(
            SkipReason.UNSUPPORTED_ENGINE,
            f"container {name} runs TensorRT-LLM, for which the client has no connector; if it uses an LMCache server, "
            "label the pod of that server",
        )
    if is_decided or kind in _WITHOUT_TIERS:
        return
    cause = _unsupported(info) or precedes_interface(kind, info.version)
    if cause:
        raise Skip(SkipReason.UNSUPPORTED_ENGINE, f"container {name} {cause}")


def doubts(container: dict[str, Any], kind: str, info: ContainerInfo) -> list[str]:
    """Return warnings about an engine that perhaps runs without the pool."""
    if kind in _WITHOUT_TIERS:
        return []
    clauses = [info.warning, _unsupported(info), untested(kind, info.version)]
    if info.hides_client:
        clauses.append(f"{info.hides_client}, which hides the client: the engine runs without the pool")
    return [f"container {container.get('name')} {clause}" for clause in clauses if clause]


def no_engine(inspected: Sequence[tuple[str, ContainerInfo]]) -> Skip:
    """Return the Skip of a pod without a recognized engine. `inspected`: names of containers, and what they run."""
    for name, info in inspected:
        if info.obstacle:
            return Skip(SkipReason.UNSUPPORTED_ENGINE, f"container {name} {info.obstacle}", has_engine=False)
    return Skip(
        SkipReason.UNSUPPORTED_ENGINE,
        "no container runs a known engine (vllm serve, sglang serve, lmcache server, their modules, a vLLM image "
        f"without a command); if one does, set the annotations {ANNOTATION_ENGINE} and {ANNOTATION_CONTAINER}",
        has_engine=False,
    )


def _unsupported(info: ContainerInfo) -> str:
    return f"runs on {info.accelerator}, which the client does not support" if info.accelerator else ""
