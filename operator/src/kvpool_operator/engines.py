"""Engine pods that ask for a pool: given, skipped, missed. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["OPTED_IN", "EnginePods", "count"]

OPTED_IN: Final = "kvpool.dev/inject=true"
_POOL: Final = "kvpool.dev/pool"
_INJECTED: Final = "kvpool.dev/injected"
_SKIPPED: Final = "kvpool.dev/skip-reason"
_INIT_CONTAINER: Final = "kvpool-client"


@dataclass(frozen=True)
class EnginePods:
    """How many pods of one pool are in which state; `missed_names` holds a few for the message."""

    injected: int = 0
    skipped: int = 0
    missed: int = 0
    stale: int = 0
    missed_names: tuple[str, ...] = ()

    @property
    def selected(self) -> int:
        return self.injected + self.skipped + self.missed


def count(pods: Iterable[dict[str, Any]], namespace: str, name: str, sidecar_image: str) -> EnginePods:
    """The pods (opted in, of any namespace) that ask for the pool `namespace/name`.

    A pod that was injected says so by `namespace/name`. Others say what their owner wrote: that, the bare name, or
    nothing, which is taken to mean a pool of their own namespace.
    """
    injected = skipped = stale = 0
    missed = []
    for pod in pods:
        metadata = pod.get("metadata") or {}
        phase = (pod.get("status") or {}).get("phase")
        if "deletionTimestamp" in metadata or phase in ("Succeeded", "Failed"):
            continue
        notes = metadata.get("annotations") or {}
        asked, own = notes.get(_POOL, ""), metadata.get("namespace") == namespace
        if not (asked == f"{namespace}/{name}" or asked == name or (not asked and own)):
            continue
        if _INJECTED in notes:
            injected += 1
            stale += _client_image(pod) not in ("", sidecar_image)
        elif _SKIPPED in notes:
            skipped += 1
        else:
            missed.append(f"{metadata.get('namespace')}/{metadata.get('name')}")
    return EnginePods(injected, skipped, len(missed), stale, tuple(sorted(missed)[:3]))


def _client_image(pod: dict[str, Any]) -> str:
    inits = (pod.get("spec") or {}).get("initContainers") or []
    return next((str(c.get("image", "")) for c in inits if c.get("name") == _INIT_CONTAINER), "")
