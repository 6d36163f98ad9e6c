"""Client in a pod: a volume for its socket, an init container that installs the code, and PYTHONPATH."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from kvpool.config import CLIENT_CONFIG_ENV
from kvpool_operator.injection.connector import escape_expansion
from kvpool_operator.injection.image_paths import image_pythonpath
from kvpool_operator.injection.init_resources import init_resources
from kvpool_operator.injection.pod import append, default_env, find_by_name, items, mount_at, spec
from kvpool_operator.injection.skip import Skip, SkipReason

if TYPE_CHECKING:
    from kvpool_operator.injection.context import InjectionContext, InjectionSettings
    from kvpool_operator.injection.pod import Pod

__all__ = ["INIT_CONTAINER", "add_init_container", "inject_client"]

VOLUME: Final = "kvpool"
MOUNT: Final = "/run/kvpool"
CLIENT_DIR: Final = f"{MOUNT}/client"
INIT_CONTAINER: Final = "kvpool-client"
USER_PYTHONPATH: Final = "KVPOOL_USER_PYTHONPATH"


def inject_client(context: InjectionContext) -> None:
    """Add what is absent to one container. Raises Skip(name-conflict) if a reserved name is in use."""
    if not context.is_reinvocation and find_by_name(spec(context.pod).get("initContainers"), INIT_CONTAINER):
        raise Skip(SkipReason.NAME_CONFLICT, f"the pod already has an init container {INIT_CONTAINER}; rename it")
    _add_volume(context.pod, context.container)
    _prefix_pythonpath(context.container)
    default_env(context.container, CLIENT_CONFIG_ENV, escape_expansion(context.settings.client_config))


def _add_volume(pod: Pod, container: dict[str, Any]) -> None:
    volume = find_by_name(spec(pod).get("volumes"), VOLUME)
    if volume is not None and "emptyDir" not in volume:
        raise Skip(SkipReason.NAME_CONFLICT, f"the pod has a volume {VOLUME} that is not an emptyDir; rename it")
    if volume is None:
        append(spec(pod), "volumes", {"name": VOLUME, "emptyDir": {}})
    mount = mount_at(container, MOUNT)
    if mount is not None and mount.get("name") != VOLUME:
        raise Skip(
            SkipReason.NAME_CONFLICT,
            f"container {container.get('name')} mounts another volume at {MOUNT}; mount it elsewhere",
        )
    if mount is None:
        # connecting to a socket needs no writable mount
        append(container, "volumeMounts", {"name": VOLUME, "mountPath": MOUNT, "readOnly": True})


def add_init_container(pod: Pod, settings: InjectionSettings, engine: dict[str, Any]) -> None:
    """Add the init container that installs the client, unless it is present.

    It runs last, but before native sidecars and init containers that use the client. `engine` is the first injected
    container.
    """
    inits = items(spec(pod), "initContainers")
    if find_by_name(inits, INIT_CONTAINER) is not None:
        return
    users = (i for i, c in enumerate(inits) if find_by_name(c.get("volumeMounts"), VOLUME))
    inits.insert(next(users, len(inits)), _init_container(pod, settings, engine))


def _init_container(pod: Pod, settings: InjectionSettings, engine: dict[str, Any]) -> dict[str, Any]:
    """Return the init container. It satisfies the `restricted` Pod Security Standard."""
    security: dict[str, Any] = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    if (spec(pod).get("securityContext") or {}).get("runAsUser") == 0:
        # inherited root contradicts runAsNonRoot, and the pod would never start
        security |= {"runAsUser": 65532, "runAsGroup": 65532}
    return {
        "name": INIT_CONTAINER,
        "image": settings.sidecar_image,
        "imagePullPolicy": settings.image_pull_policy,
        "command": ["kvpool-sidecar", "install-client", CLIENT_DIR],
        "resources": init_resources(engine),
        "securityContext": security,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [{"name": VOLUME, "mountPath": MOUNT}],
    }


def _prefix_pythonpath(container: dict[str, Any]) -> None:
    """Prepend the client directory.

    A PYTHONPATH that only the image sets is not visible here and is replaced, but for directories of known images.
    """
    env = items(container, "env")
    entry = find_by_name(env, "PYTHONPATH")
    if entry is None:
        paths = [CLIENT_DIR, *image_pythonpath(str(container.get("image") or ""))]
        env.append({"name": "PYTHONPATH", "value": ":".join(paths)})
        return
    if "valueFrom" in entry:  # keep the reference under another name: a variable can use earlier ones
        env.insert(env.index(entry), {"name": USER_PYTHONPATH, "valueFrom": entry.pop("valueFrom")})
        entry["value"] = f"{CLIENT_DIR}:$({USER_PYTHONPATH})"
        return
    value = entry.get("value") or ""
    if CLIENT_DIR not in value.split(":"):
        entry["value"] = f"{CLIENT_DIR}:{value}" if value else CLIENT_DIR
