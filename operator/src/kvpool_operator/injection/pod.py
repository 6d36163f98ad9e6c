"""Small steps on a pod's JSON, which is changed in place. Absent and null are the same."""

from __future__ import annotations

from typing import Any

from kvpool_operator.injection.skip import Skip, SkipReason

__all__ = ["Pod", "add_volume", "append", "default_env", "env_names", "items", "mount_at", "named", "notes_of", "spec"]

Pod = dict[str, Any]


def spec(pod: Pod) -> dict[str, Any]:
    """The pod's spec."""
    found: dict[str, Any] = pod.setdefault("spec", {})
    return found


def notes_of(pod: Pod) -> dict[str, str]:
    """The pod's annotations, to be written to."""
    metadata = pod["metadata"] = pod.get("metadata") or {}
    notes: dict[str, str] = metadata.get("annotations") or {}
    metadata["annotations"] = notes
    return notes


def items(owner: dict[str, Any], name: str) -> list[Any]:
    """The list of that name, made where there is none."""
    found: list[Any] = owner.get(name) or []
    owner[name] = found
    return found


def append(owner: dict[str, Any], name: str, item: dict[str, Any]) -> None:
    """One more in the list of that name."""
    items(owner, name).append(item)


def named(those: list[dict[str, Any]] | None, name: str) -> dict[str, Any] | None:
    """The entry of that name."""
    return next((i for i in those or [] if i.get("name") == name), None)


def mount_at(container: dict[str, Any], path: str) -> dict[str, Any] | None:
    """What the container mounts there."""
    mounts: list[dict[str, Any]] = container.get("volumeMounts") or []
    return next((m for m in mounts if str(m.get("mountPath", "")).rstrip("/") == path), None)


def env_names(container: dict[str, Any]) -> set[str]:
    """Names of the container's variables, whatever they come from."""
    return {str(e.get("name")) for e in container.get("env") or []}


def default_env(container: dict[str, Any], name: str, value: str) -> None:
    """Set a variable that the user has not set."""
    if name not in env_names(container):
        append(container, "env", {"name": name, "value": value})


def add_volume(pod: Pod, container: dict[str, Any], volume: dict[str, Any], path: str) -> None:
    """Mount an emptyDir of ours, unless something is mounted there. Skip(name-conflict) if its name is taken."""
    if mount_at(container, path) is not None:
        return
    present = named(spec(pod).get("volumes"), volume["name"])
    if present is None:
        append(spec(pod), "volumes", volume)
    elif (present.get("emptyDir") or {}).get("medium") != volume["emptyDir"].get("medium"):
        raise Skip(SkipReason.NAME_CONFLICT, f"the pod has a volume {volume['name']} of its own; give it another name")
    append(container, "volumeMounts", {"name": volume["name"], "mountPath": path})
