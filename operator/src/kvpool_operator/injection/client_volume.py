"""The client in a pod: a volume for its socket, an init container that brings the code, and the path to that."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from kvpool.config import CLIENT_CONFIG_ENV
from kvpool_operator.injection.connector import literal
from kvpool_operator.injection.pod import append, default_env, items, mount_at, named, spec
from kvpool_operator.injection.skip import Skip, SkipReason

if TYPE_CHECKING:
    from kvpool_operator.injection.context import InjectionContext, InjectionSettings
    from kvpool_operator.injection.pod import Pod

__all__ = ["INIT_CONTAINER", "add"]

VOLUME: Final = "kvpool"
MOUNT: Final = "/run/kvpool"
CLIENT_DIR: Final = f"{MOUNT}/client"
INIT_CONTAINER: Final = "kvpool-client"
USER_PYTHONPATH: Final = "KVPOOL_USER_PYTHONPATH"


def add(target: InjectionContext) -> None:
    """All of it, where it is absent. Skip(name-conflict) if a name of ours is taken."""
    _add_volume(target.pod, target.container)
    _add_init_container(target.pod, target.injection, again=target.again)
    _prefix_pythonpath(target.container)
    default_env(target.container, CLIENT_CONFIG_ENV, literal(target.injection.client_config))


def _add_volume(pod: Pod, container: dict[str, Any]) -> None:
    volume = named(spec(pod).get("volumes"), VOLUME)
    if volume is not None and "emptyDir" not in volume:
        raise Skip(SkipReason.NAME_CONFLICT, f"the pod has a volume {VOLUME} that is no emptyDir; give it another name")
    if volume is None:
        append(spec(pod), "volumes", {"name": VOLUME, "emptyDir": {}})
    mount = mount_at(container, MOUNT)
    if mount is not None and mount.get("name") != VOLUME:
        raise Skip(
            SkipReason.NAME_CONFLICT, f"container {container.get('name')} mounts something else at {MOUNT}; move it"
        )
    if mount is None:
        # connecting to a socket needs no writable mount
        append(container, "volumeMounts", {"name": VOLUME, "mountPath": MOUNT, "readOnly": True})


def _add_init_container(pod: Pod, injection: InjectionSettings, *, again: bool) -> None:
    wanted = _init_container(pod, injection)
    present = named(spec(pod).get("initContainers"), INIT_CONTAINER)
    if present is None:
        append(spec(pod), "initContainers", wanted)
    elif not again:
        raise Skip(
            SkipReason.NAME_CONFLICT, f"the pod has an init container {INIT_CONTAINER} of its own; give it another name"
        )


def _init_container(pod: Pod, injection: InjectionSettings) -> dict[str, Any]:
    """Admissible under the `restricted` standard. Requests equal limits, so that a Guaranteed pod stays Guaranteed."""
    security: dict[str, Any] = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    if (spec(pod).get("securityContext") or {}).get("runAsUser") == 0:
        # inherited root would contradict runAsNonRoot and the pod would never start
        security |= {"runAsUser": 65532, "runAsGroup": 65532}
    resources = {"cpu": "500m", "memory": "128Mi"}
    return {
        "name": INIT_CONTAINER,
        "image": injection.sidecar_image,
        "imagePullPolicy": injection.image_pull_policy,
        "command": ["kvpool-sidecar", "install-client", CLIENT_DIR],
        "resources": {"requests": dict(resources), "limits": dict(resources)},
        "securityContext": security,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [{"name": VOLUME, "mountPath": MOUNT}],
    }


def _prefix_pythonpath(container: dict[str, Any]) -> None:
    """Our directory before the user's. A PYTHONPATH that only the image sets cannot be seen and is replaced."""
    env = items(container, "env")
    entry = named(env, "PYTHONPATH")
    if entry is None:
        env.append({"name": "PYTHONPATH", "value": CLIENT_DIR})
        return
    if "valueFrom" in entry:  # keep the reference under another name: a variable may use those before it
        env.insert(env.index(entry), {"name": USER_PYTHONPATH, "valueFrom": entry.pop("valueFrom")})
        entry["value"] = f"{CLIENT_DIR}:$({USER_PYTHONPATH})"
        return
    value = entry.get("value") or ""
    if CLIENT_DIR not in value.split(":"):
        entry["value"] = f"{CLIENT_DIR}:{value}" if value else CLIENT_DIR
