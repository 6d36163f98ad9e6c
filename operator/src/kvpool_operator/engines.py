"""Engine pods that ask for a pool: given, skipped, missed. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["OPTED_IN", "EnginePods", "count"]

OPTED_IN: Final = "kvpool.dev/inject=true"
_POOL: Final = "kvpool.dev/pool"
_INJECTED: Final = "kvpool.dev/injected"
_FAMILY: Final = "kvpool.dev/injected-engine"
_ALONE: Final = frozenset({"dynamo"})  # kvpool_operator.webhook.inject.NO_CLIENT
_SKIPPED: Final = "kvpool.dev/skip-reason"
_INIT_CONTAINER: Final = "kvpool-client"


@dataclass(frozen=True)
class EnginePods:
    """How many pods of one pool are in which state; `..._names` hold a few for messages."""

    injected: int = 0
    skipped: int = 0
    missed: int = 0
    stale: int = 0
    missed_names: tuple[str, ...] = ()
    alone: int = 0
    """Injected pods whose engine has no way in for a remote tier."""
    alone_names: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    """namespace/name of the injected pods, by uid."""

    @property
    def selected(self) -> int:
        return self.injected + self.skipped + self.missed


def count(pods: Iterable[dict[str, Any]], namespace: str, name: str, sidecar_image: str) -> EnginePods:
    """The pods (opted in, of any namespace) that ask for the pool `namespace/name`.

    A pod that was injected says so by `namespace/name`. Others say what their owner wrote: that, the bare name, or
    nothing, which is taken to mean a pool of their own namespace.
    """
    injected = skipped = stale = 0
    missed, alone, names = [], [], {}
    for pod in pods:
        metadata = pod.get("metadata") or {}
        phase = (pod.get("status") or {}).get("phase")
        if "deletionTimestamp" in metadata or phase in ("Succeeded", "Failed"):
            continue
        notes = metadata.get("annotations") or {}
        asked, own = notes.get(_POOL, ""), metadata.get("namespace") == namespace
        if not (asked == f"{namespace}/{name}" or asked == name or (not asked and own)):
            continue
        full = f"{metadata.get('namespace')}/{metadata.get('name')}"
        if _INJECTED in notes:
            injected += 1
            names[str(metadata.get("uid", ""))] = full
            if notes.get(_FAMILY) in _ALONE:
                alone.append(full)
            stale += _client_image(pod) not in ("", sidecar_image)
        elif _SKIPPED in notes:
            skipped += 1
        else:
            missed.append(full)
    return EnginePods(
        injected=injected,
        skipped=skipped,
        missed=len(missed),
        stale=stale,
        missed_names=tuple(sorted(missed)[:3]),
        alone=len(alone),
        alone_names=tuple(sorted(alone)[:3]),
        names=names,
    )


def _client_image(pod: dict[str, Any]) -> str:
    inits = (pod.get("spec") or {}).get("initContainers") or []
    return next((str(c.get("image", "")) for c in inits if c.get("name") == _INIT_CONTAINER), "")
