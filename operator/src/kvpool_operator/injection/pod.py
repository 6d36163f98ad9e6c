"""Helpers that modify the JSON of a pod in place. Absent and null are equal."""

from __future__ import annotations

import posixpath
import re
from typing import Any, Final

from kvpool_operator.injection.skip import Skip, SkipReason

__all__ = [
    "Pod",
    "add_volume",
    "all_containers",
    "annotations_of",
    "append",
    "default_env",
    "env_names",
    "find_by_name",
    "items",
    "mount_at",
    "private_volume_name",
    "sandbox_warnings",
    "spec",
]

Pod = dict[str, Any]
_SANDBOX: Final = re.compile(r"(?:^|[-.])(?:kata|gvisor|runsc|firecracker)")


def spec(pod: Pod) -> dict[str, Any]:
    """Return the spec of the pod."""
    found: dict[str, Any] = pod.setdefault("spec", {})
    return found


def annotations_of(pod: Pod) -> dict[str, str]:
    """Return the annotations of the pod, created if absent."""
    metadata = pod["metadata"] = pod.get("metadata") or {}
    annotations: dict[str, str] = metadata.get("annotations") or {}
    metadata["annotations"] = annotations
    return annotations


def items(owner: dict[str, Any], name: str) -> list[Any]:
    """Return the list with that name, created if absent."""
    found: list[Any] = owner.get(name) or []
    owner[name] = found
    return found


def append(owner: dict[str, Any], name: str, item: dict[str, Any]) -> None:
    """Append to the list with that name."""
    items(owner, name).append(item)


def find_by_name(entries: list[dict[str, Any]] | None, name: str) -> dict[str, Any] | None:
    """Return the entry with that name, or None."""
    return next((i for i in entries or [] if i.get("name") == name), None)


def mount_at(container: dict[str, Any], path: str) -> dict[str, Any] | None:
    """Return the container's volume mount at `path`, or None. Of `/dev//shm/` and the like, the path counts."""
    mounts: list[dict[str, Any]] = container.get("volumeMounts") or []
    return next((m for m in mounts if posixpath.normpath(str(m.get("mountPath", ""))) == path), None)


def env_names(container: dict[str, Any]) -> set[str]:
    """Return the names of the container's environment variables."""
    return {str(e.get("name")) for e in container.get("env") or []}


def default_env(container: dict[str, Any], name: str, value: str) -> None:
    """Set an environment variable unless the user has set it."""
    if name not in env_names(container):
        append(container, "env", {"name": name, "value": value})


def sandbox_warnings(pod: Pod) -> list[str]:
    """Return a warning if the runtime class is one of a sandbox, by its name, which passes no descriptors."""
    name = str(spec(pod).get("runtimeClassName") or "")
    if not _SANDBOX.search(name):
        return []
    return [f"runtime class {name} seems to be a sandbox (gVisor, Kata), in which every load misses"]


def private_volume_name(pod: Pod, container: dict[str, Any], name: str) -> str:
    """Return `name`, or `name-2` and so on if another container mounts a volume of that name already."""
    others = [c for c in all_containers(pod) if c is not container]
    taken = {m.get("name") for c in others for m in c.get("volumeMounts") or []}
    return name if name not in taken else next(n for i in range(2, 10_000) if (n := f"{name}-{i}") not in taken)


def all_containers(pod: Pod) -> list[dict[str, Any]]:
    """Return the containers of the pod, then its init containers."""
    return [c for kind in ("containers", "initContainers") for c in spec(pod).get(kind) or []]


def add_volume(pod: Pod, container: dict[str, Any], volume: dict[str, Any], path: str) -> None:
    """Mount an emptyDir unless `path` is a mount already. Raises Skip(name-conflict) if the volume name is in use."""
    if mount_at(container, path) is not None:
        return
    present = find_by_name(spec(pod).get("volumes"), volume["name"])
    if present is None:
        append(spec(pod), "volumes", volume)
    elif (present.get("emptyDir") or {}).get("medium") != volume["emptyDir"].get("medium"):
        raise Skip(SkipReason.NAME_CONFLICT, f"the pod already has a volume {volume['name']}; rename it")
    append(container, "volumeMounts", {"name": volume["name"], "mountPath": path})
