"""Selection of the containers of a pod that run an engine, among them native sidecars."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from kvpool_operator.api.annotations import ANNOTATION_CONTAINER, ANNOTATION_ENGINE
from kvpool_operator.injection.command_line import ContainerInfo, inspect_container
from kvpool_operator.injection.engines import match_score
from kvpool_operator.injection.pod import Pod, spec
from kvpool_operator.injection.skip import Skip, SkipReason
from kvpool_operator.injection.suitability import no_engine

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpool_operator.injection.annotations import InjectionRequest

__all__ = ["EngineContainer", "find_engines", "has_engine"]

Section = Literal["containers", "initContainers"]
_SECTIONS: Final[tuple[Section, ...]] = ("containers", "initContainers")


@dataclass(frozen=True)
class EngineContainer:
    """Place of a container in the spec of its pod, and what its command line starts."""

    section: Section
    index: int
    name: str
    info: ContainerInfo
    score: int
    """How well it matches the requested engine kind; 0: only the user's annotation selects it."""

    def of(self, pod: Pod) -> dict[str, Any]:
        """Return the container in `pod` or a copy of it. Valid until an init container is inserted."""
        found: dict[str, Any] = spec(pod)[self.section][self.index]
        return found


def find_engines(
    pod: Pod, request: InjectionRequest, is_candidate: Callable[[dict[str, Any]], bool] | None = None
) -> list[EngineContainer]:
    """Return the containers to inject, never empty, in the order of the pod.

    They are those that the annotation names, otherwise all that run an engine of the requested kind. `is_candidate`
    limits them to containers that it accepts, if there are any. Raises Skip if there is none.
    """
    if ((spec(pod).get("os") or {}).get("name") or "linux") != "linux":
        raise Skip(SkipReason.UNSUPPORTED_ENGINE, "only Linux pods are supported", has_engine=False)
    containers = _inspect(pod, request.engine)
    if request.containers:
        missing = [name for name in request.containers if name not in {c.name for c in containers}]
        if missing:
            raise Skip(
                SkipReason.CONTAINER_NOT_FOUND,
                f"the pod has no container {missing[0]!r}; correct annotation {ANNOTATION_CONTAINER}",
            )
        containers = [c for c in containers if c.name in request.containers]
    if not containers:
        raise Skip(SkipReason.CONTAINER_NOT_FOUND, "the pod has no container")
    if is_candidate is not None:
        containers = [c for c in containers if is_candidate(c.of(pod))] or containers
    engines = [c for c in containers if c.score]
    if len(request.containers) > 1 and request.engine != "auto":
        return containers
    if not engines and request.engine == "auto":
        raise no_engine([(c.name, c.info) for c in containers])
    if not engines:
        return containers[:1]
    best = max(c.score for c in engines)
    # a requested kind is that of the best match: next to an LMCache server, the engine is not LMCache's
    return engines if request.engine == "auto" else [c for c in engines if c.score == best]


def has_engine(pod: Pod) -> bool:
    """Whether a container of the pod runs a known engine, or an annotation names its engine."""
    named = ((pod.get("metadata") or {}).get("annotations") or {}).get(ANNOTATION_ENGINE, "auto") != "auto"
    return named or any(engine.score for engine in _inspect(pod, "auto"))


def _inspect(pod: Pod, requested: str) -> list[EngineContainer]:
    """Inspect the containers, then the init containers that keep running next to them (native sidecars)."""
    found = []
    for section in _SECTIONS:
        for i, container in enumerate(spec(pod).get(section) or []):
            if section == "containers" or container.get("restartPolicy") == "Always":
                info = inspect_container(container)
                name = str(container.get("name"))
                found.append(EngineContainer(section, i, name, info, match_score(requested, info)))
    return found
