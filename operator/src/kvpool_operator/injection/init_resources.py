"""Resources of the init container that installs the client."""

from __future__ import annotations

from typing import Any, Final

from kvpool_operator.api.quantity import to_milli

__all__ = ["init_resources"]

_COPIED: Final = ("cpu", "memory", "ephemeral-storage")


def init_resources(engine: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of the engine container's requests and limits of cpu, memory and ephemeral storage.

    A pod needs the larger of what its init containers and its containers request, so the copy costs nothing, keeps the
    QoS class, and passes every LimitRange and ResourceQuota that the engine's container passes. Without requests and
    limits of the engine there are none here either: a LimitRange then sets its defaults for both.
    """
    given = engine.get("resources") or {}
    copied: dict[str, Any] = {
        part: chosen for part in ("requests", "limits") if (chosen := _chosen(given.get(part) or {}))
    }
    milli = {to_milli(part["cpu"]) for part in copied.values() if "cpu" in part}
    # whole CPUs would be exclusive ones of some NUMA node (static CPU manager), which the engine then has to use
    if len(milli) == 1 and min(milli) > 1000 and min(milli) % 1000 == 0:
        for part in copied.values():
            part["cpu"] = f"{min(milli) - 1}m"
    return copied


def _chosen(resources: dict[str, Any]) -> dict[str, Any]:
    return {name: resources[name] for name in _COPIED if name in resources}
