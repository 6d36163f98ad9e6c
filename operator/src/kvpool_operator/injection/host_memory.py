"""Host memory for the engine's CPU tier in a given pod, bounded so that the engine is not OOM-killed."""

from __future__ import annotations

from typing import Any, Final

from kvpool_operator.api.quantity import to_bytes
from kvpool_operator.injection.pod import find_by_name, mount_at

__all__ = ["SHM_HEADROOM", "host_memory", "shm_size"]

SHM_HEADROOM: Final = 2**30
"""Bytes of /dev/shm in addition to the host tier, for the messages between the engine's processes."""


def host_memory(
    pod: dict[str, Any], container: dict[str, Any], wanted: int, shm_mount: str, *, engines: int = 1
) -> tuple[int, list[str]]:
    """Return the bytes of the host tier, and warnings: the pool's setting, or less if the pod limits it.

    Pages of /dev/shm count against the memory limits of the container and of the pod (spec.resources), and writing past
    the size limit of a /dev/shm volume kills the writer. `engines` containers of the pod share the pod's limit.
    """
    granted, warnings = wanted, []
    for limit, what in (
        (_limit(container), f"limit of container {container.get('name')}"),
        (_limit(pod.get("spec") or {}) // engines, "limit of the pod"),
    ):
        if limit and granted > limit // 2:
            granted = limit // 2
            part = "half" if engines == 1 or not what.endswith("pod") else f"1/{2 * engines}"
            warnings = [
                f"host memory tier is {_mib(granted)} instead of the pool's {_mib(wanted)}: {part} of the memory {what}"
            ]
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


def _limit(owner: dict[str, Any]) -> int:
    """Return the memory limit of a container or of the spec of a pod; 0 without one."""
    limits = (owner.get("resources") or {}).get("limits") or {}
    return _bytes(limits.get("memory"))


def _user_shm(pod: dict[str, Any], container: dict[str, Any], shm_mount: str) -> int:
    mount = mount_at(container, shm_mount) if shm_mount else None
    volume = find_by_name((pod.get("spec") or {}).get("volumes"), mount.get("name", "")) if mount else None
    return _bytes(((volume or {}).get("emptyDir") or {}).get("sizeLimit"))


def _bytes(quantity: Any) -> int:
    """Return 0 for None. The API server has already rejected invalid quantities."""
    return to_bytes(quantity) if quantity is not None else 0


def _mib(size: int) -> str:
    return f"{size / 2**20:.0f}Mi"
