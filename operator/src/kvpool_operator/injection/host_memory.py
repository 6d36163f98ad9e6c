"""How much host memory the engine's own tier may take in a given pod: a cache must not get its engine killed."""

from __future__ import annotations

from typing import Any, Final

from kvpool_operator.injection.quantity import to_int

__all__ = ["SHM_HEADROOM", "host_memory", "shm_size"]

SHM_HEADROOM: Final = 2**30
"""Bytes of /dev/shm beside the host tier, for the engine's own messages between processes."""


def host_memory(pod: dict[str, Any], container: dict[str, Any], wanted: int, shm_mount: str) -> tuple[int, list[str]]:
    """Bytes for the host tier: the pool's setting, less where the pod has no room; and the warnings that say so.

    Pages of /dev/shm count against the container's memory limit, and writing past the size limit of a /dev/shm volume
    kills the writer.
    """
    granted, warnings = wanted, []
    limit = _limit(container)
    if limit and granted > limit // 2:
        granted = limit // 2
        warnings.append(
            f"host memory tier is {_mib(granted)} instead of the pool's {_mib(wanted)}: half of container "
            f"{container.get('name')}'s memory limit of {_mib(limit)}"
        )
    size = _user_shm(pod, container, shm_mount)
    room = max(size - SHM_HEADROOM, size // 2)
    if size and granted > room:
        granted = room
        warnings.append(f"host memory tier is {_mib(granted)} to fit the pod's own {shm_mount} of {_mib(size)}")
    return granted, warnings


def shm_size(connector: dict[str, Any], granted: int) -> int:
    """Bytes of a /dev/shm for this connector; the user's merge patch may have changed what it takes."""
    extra = connector.get("kv_connector_extra_config")
    final = extra.get("cpu_bytes_to_use") if isinstance(extra, dict) else None
    taken = final if isinstance(final, int) and not isinstance(final, bool) and 0 < final < 2**50 else granted
    return taken + SHM_HEADROOM


def _limit(container: dict[str, Any]) -> int:
    limits = (container.get("resources") or {}).get("limits") or {}
    return _bytes(limits.get("memory"))


def _user_shm(pod: dict[str, Any], container: dict[str, Any], shm_mount: str) -> int:
    for mount in container.get("volumeMounts") or []:
        if str(mount.get("mountPath", "")).rstrip("/") == shm_mount:
            for volume in (pod.get("spec") or {}).get("volumes") or []:
                if volume.get("name") == mount.get("name"):
                    return _bytes((volume.get("emptyDir") or {}).get("sizeLimit"))
    return 0


def _bytes(quantity: Any) -> int:
    """0 for none; the API server has already refused what is no quantity."""
    return to_int(quantity) if quantity is not None else 0


def _mib(size: int) -> str:
    return f"{size / 2**20:.0f}Mi"
