"""Host memory for the engine's CPU tier in a given pod, bounded so that the engine is not OOM-killed."""

from __future__ import annotations

from typing import Any, Final

from kvpool_operator.api.quantity import to_bytes

__all__ = ["SHM_HEADROOM", "host_memory", "shm_size"]

SHM_HEADROOM: Final = 2**30
"""Bytes of /dev/shm in addition to the host tier, for the messages between the engine's processes."""


def host_memory(pod: dict[str, Any], container: dict[str, Any], wanted: int, shm_mount: str) -> tuple[int, list[str]]:
    """Return the bytes of the host tier, and warnings: the pool's setting, or less if the pod limits it.

    Pages of /dev/shm count against the container's memory limit, and writing past the size limit of a /dev/shm volume
    kills the writer.
    """
    granted, warnings = wanted, []
    limit = _limit(container)
    if limit and granted > limit // 2:
        granted = limit // 2
        warnings.append(
            f"host memory tier is {_mib(granted)} instead of the pool's {_mib(wanted)}: half of the memory "
            f"limit {_mib(limit)} of container {container.get('name')}"
        )
    size = _user_shm(pod, container, shm_mount)
    available = max(size - SHM_HEADROOM, size // 2)
    if size and granted > available:
        granted = available
        warnings.append(f"host memory tier is {_mib(granted)}, limited by the pod's {shm_mount} of {_mib(size)}")
    return granted, warnings


def shm_size(connector: dict[str, Any], granted: int) -> int:
    """Return the bytes of /dev/shm for this connector. The user's merge patch can change the size of the tier."""
    extra = connector.get("kv_connector_extra_config")
    final = extra.get("cpu_bytes_to_use") if isinstance(extra, dict) else None
    tier = final if isinstance(final, int) and not isinstance(final, bool) and 0 < final < 2**50 else granted
    return tier + SHM_HEADROOM


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
    """Return 0 for None. The API server has already rejected invalid quantities."""
    return to_bytes(quantity) if quantity is not None else 0


def _mib(size: int) -> str:
    return f"{size / 2**20:.0f}Mi"
