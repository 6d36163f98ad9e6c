"""One pod -> the pod with the pool in it. Pure: dictionaries in, dictionaries out, nothing of the input is changed.

What is added has stable names and is added only where it is absent, so a second pass over the result changes
nothing, and what the user set stays. The order of the steps is the order of `inject`.
"""

from __future__ import annotations

import copy
import hashlib
from dataclasses import dataclass, field
from typing import Any, Final

from kvpool.config import CLIENT_CONFIG_ENV
from kvpool_operator.webhook.command import Channel, Reading, read_container
from kvpool_operator.webhook.connector import compact, literal, vllm_connector
from kvpool_operator.webhook.memory import host_memory, shm_size
from kvpool_operator.webhook.mergepatch import merge_patch
from kvpool_operator.webhook.reasons import Skip, SkipReason
from kvpool_operator.webhook.wishes import (
    ANNOTATION_CONTAINER,
    ANNOTATION_ENGINE,
    ANNOTATION_INJECTED,
    ANNOTATION_POOL,
    ANNOTATION_SKIP,
    Wishes,
)

__all__ = ["Injected", "Injection", "inject", "is_injected", "mark_skipped"]

VOLUME: Final = "kvpool"
MOUNT: Final = "/run/kvpool"
CLIENT_DIR: Final = f"{MOUNT}/client"
INIT_CONTAINER: Final = "kvpool-client"
SHM_VOLUME: Final = "kvpool-shm"
SHM_MOUNT: Final = "/dev/shm"  # noqa: S108  the engine's shared memory, not a temporary file of ours
CONNECTOR_ENV: Final = "KVPOOL_VLLM_KV_TRANSFER_CONFIG"
USER_PYTHONPATH: Final = "KVPOOL_USER_PYTHONPATH"
CONNECTOR_ARG: Final = "--kv-transfer-config"
HASH_ARG: Final = ("--prefix-caching-hash-algo", "sha256_cbor")

Pod = dict[str, Any]


@dataclass(frozen=True)
class Injection:
    """Everything that does not depend on the pod: of the pool, and of this installation."""

    pool: str
    """namespace/name"""
    block_tokens: int
    host_memory_bytes: int
    client_config: str
    sidecar_image: str
    image_pull_policy: str = "IfNotPresent"


@dataclass(frozen=True)
class Injected:
    """The changed pod, and what its owner should hear (shown by kubectl)."""

    pod: Pod
    warnings: list[str] = field(default_factory=list)


def inject(pod: Pod, wishes: Wishes, injection: Injection) -> Injected:
    """The pod with the pool in it. Skip says why it must stay as it is."""
    pod = copy.deepcopy(pod)
    again = is_injected(pod)
    warnings: list[str] = []
    container, reading = _engine_container(pod, wishes)
    if reading.connector_present and not again and wishes.engine != "none":
        raise Skip(
            SkipReason.CONNECTOR_PRESENT,
            f"container {container.get('name')} already chooses a KV connector; remove it, "
            f'or set {ANNOTATION_ENGINE}: "none" to get only the client and its socket',
        )
    _add_volume(pod, container)
    _add_init_container(pod, injection, again=again)
    _prefix_pythonpath(container)
    _default_env(container, CLIENT_CONFIG_ENV, literal(injection.client_config))
    if wishes.engine != "none":
        memory, why = host_memory(pod, container, injection.host_memory_bytes, SHM_MOUNT)
        warnings += why
        connector = merge_patch(
            vllm_connector(block_tokens=injection.block_tokens, host_memory_bytes=memory), wishes.connector_patch or {}
        )
        _default_env(container, "PYTHONHASHSEED", "0")
        _add_connector(container, reading, literal(compact(connector)))
        _add_shm(pod, container, shm_size(connector, memory))
    notes = _annotations(pod)
    notes.pop(ANNOTATION_SKIP, None)
    notes[ANNOTATION_POOL] = injection.pool
    notes[ANNOTATION_INJECTED] = _digest(pod, container)
    return Injected(pod, [] if again else warnings)


def mark_skipped(pod: Pod, skip: Skip) -> Pod:
    """The pod with the reason in an annotation; one that an earlier pass injected stays as it is."""
    if is_injected(pod):
        return pod
    pod = copy.deepcopy(pod)
    notes = _annotations(pod)
    notes.pop(ANNOTATION_INJECTED, None)
    notes[ANNOTATION_SKIP] = str(skip)
    return pod


def is_injected(pod: Pod) -> bool:
    """Whether an earlier pass did its work: the annotation and the init container are both there."""
    notes = (pod.get("metadata") or {}).get("annotations") or {}
    return ANNOTATION_INJECTED in notes and _named(_spec(pod).get("initContainers"), INIT_CONTAINER) is not None


def _engine_container(pod: Pod, wishes: Wishes) -> tuple[dict[str, Any], Reading]:
    """The container that the annotation names, else the first whose command line or image is an engine's."""
    if ((_spec(pod).get("os") or {}).get("name") or "linux") != "linux":
        raise Skip(SkipReason.UNSUPPORTED_ENGINE, "the pool serves Linux pods only")
    containers = _spec(pod).get("containers") or []
    if wishes.container:
        chosen = _named(containers, wishes.container)
        if chosen is None:
            raise Skip(
                SkipReason.CONTAINER_NOT_FOUND,
                f"annotation {ANNOTATION_CONTAINER} names {wishes.container!r}, which the pod does not have",
            )
        containers = [chosen]
    if not containers:
        raise Skip(SkipReason.CONTAINER_NOT_FOUND, "the pod has no container")
    readings = [(c, read_container(c)) for c in containers]
    found = next(((c, r) for c, r in readings if r.engine), None)
    if found:
        return found
    if wishes.engine == "auto":
        raise Skip(
            SkipReason.UNSUPPORTED_ENGINE,
            "no container starts an engine that is known (vllm serve, python -m vllm.entrypoints.openai.api_server, "
            f"an image of vLLM); if one does, set {ANNOTATION_ENGINE}: vllm and {ANNOTATION_CONTAINER}: <its name>",
        )
    return readings[0]


def _add_volume(pod: Pod, container: dict[str, Any]) -> None:
    volume = _named(_spec(pod).get("volumes"), VOLUME)
    if volume is not None and "emptyDir" not in volume:
        raise Skip(SkipReason.NAME_CONFLICT, f"the pod has a volume {VOLUME} that is no emptyDir; give it another name")
    if volume is None:
        _append(_spec(pod), "volumes", {"name": VOLUME, "emptyDir": {}})
    mount = _mount_at(container, MOUNT)
    if mount is not None and mount.get("name") != VOLUME:
        raise Skip(
            SkipReason.NAME_CONFLICT, f"container {container.get('name')} mounts something else at {MOUNT}; move it"
        )
    if mount is None:
        # connecting to a socket needs no writable mount
        _append(container, "volumeMounts", {"name": VOLUME, "mountPath": MOUNT, "readOnly": True})


def _add_init_container(pod: Pod, injection: Injection, *, again: bool) -> None:
    wanted = _init_container(pod, injection)
    present = _named(_spec(pod).get("initContainers"), INIT_CONTAINER)
    if present is None:
        _append(_spec(pod), "initContainers", wanted)
    elif not again:
        raise Skip(
            SkipReason.NAME_CONFLICT, f"the pod has an init container {INIT_CONTAINER} of its own; give it another name"
        )


def _init_container(pod: Pod, injection: Injection) -> dict[str, Any]:
    """Admissible under the `restricted` standard. Requests equal limits, so that a Guaranteed pod stays Guaranteed."""
    security: dict[str, Any] = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    if (_spec(pod).get("securityContext") or {}).get("runAsUser") == 0:
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
    env = _list(container, "env")
    entry = _named(env, "PYTHONPATH")
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


def _default_env(container: dict[str, Any], name: str, value: str) -> None:
    env = _list(container, "env")
    if _named(env, name) is None:
        env.append({"name": name, "value": value})


def _add_connector(container: dict[str, Any], reading: Reading, connector: str) -> None:
    if reading.connector_present:
        return
    if reading.channel is Channel.ENVIRONMENT:
        _default_env(container, CONNECTOR_ENV, connector)
        return
    args = _list(container, "args")
    args += [CONNECTOR_ARG, connector]
    if not reading.hash_algo_present:
        args += HASH_ARG  # the default hashes pickled bytes, which differ between Python versions


def _add_shm(pod: Pod, container: dict[str, Any], size: int) -> None:
    """vLLM keeps its host tier in /dev/shm; a container's default there is 64 MiB."""
    if _mount_at(container, SHM_MOUNT) is not None or _spec(pod).get("hostIPC"):
        return
    volume = _named(_spec(pod).get("volumes"), SHM_VOLUME)
    if volume is None:
        volume = {"name": SHM_VOLUME, "emptyDir": {"medium": "Memory", "sizeLimit": f"{-(-size // 2**20)}Mi"}}
        _append(_spec(pod), "volumes", volume)
    elif (volume.get("emptyDir") or {}).get("medium") != "Memory":
        raise Skip(SkipReason.NAME_CONFLICT, f"the pod has a volume {SHM_VOLUME} of its own; give it another name")
    _append(container, "volumeMounts", {"name": SHM_VOLUME, "mountPath": SHM_MOUNT})


def _digest(pod: Pod, container: dict[str, Any]) -> str:
    """Over what the pod now carries, so that a second pass finds the same."""
    names = ("PYTHONPATH", "PYTHONHASHSEED", CLIENT_CONFIG_ENV, CONNECTOR_ENV)
    env = {e.get("name"): e.get("value") for e in container.get("env") or []}
    args = container.get("args") or []
    init = _named(_spec(pod).get("initContainers"), INIT_CONTAINER) or {}
    carried = {
        "pool": pod["metadata"]["annotations"][ANNOTATION_POOL],
        "container": container.get("name"),
        "image": init.get("image"),
        "env": {n: env.get(n) for n in names},
        "connector": next((args[i + 1] for i in range(len(args) - 1) if args[i] == CONNECTOR_ARG), None),
    }
    return hashlib.sha256(compact(carried).encode()).hexdigest()[:16]


def _spec(pod: Pod) -> dict[str, Any]:
    spec: dict[str, Any] = pod.setdefault("spec", {})
    return spec


def _named(items: list[dict[str, Any]] | None, name: str) -> dict[str, Any] | None:
    return next((i for i in items or [] if i.get("name") == name), None)


def _mount_at(container: dict[str, Any], path: str) -> dict[str, Any] | None:
    mounts: list[dict[str, Any]] = container.get("volumeMounts") or []
    return next((m for m in mounts if str(m.get("mountPath", "")).rstrip("/") == path), None)


def _annotations(pod: Pod) -> dict[str, str]:
    metadata = pod["metadata"] = pod.get("metadata") or {}
    notes: dict[str, str] = metadata.get("annotations") or {}
    metadata["annotations"] = notes
    return notes


def _list(owner: dict[str, Any], name: str) -> list[Any]:
    items: list[Any] = owner.get(name) or []
    owner[name] = items
    return items


def _append(owner: dict[str, Any], name: str, item: dict[str, Any]) -> None:
    _list(owner, name).append(item)
