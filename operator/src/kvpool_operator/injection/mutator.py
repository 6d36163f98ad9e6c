"""One pod -> the pod with the pool in it. Pure: dictionaries in, dictionaries out, nothing of the input is changed.

What is added has stable names and is added only where it is absent, so a second pass over the result changes
nothing, and what the user set stays. What an engine is told is in kvpool_operator.injection.engines.
"""

from __future__ import annotations

import copy
import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from kvpool_operator.api.annotations import (
    ANNOTATION_CONTAINER,
    ANNOTATION_ENGINE,
    ANNOTATION_INJECTED,
    ANNOTATION_INJECTED_ENGINE,
    ANNOTATION_INJECTED_REVISION,
    ANNOTATION_POOL,
    ANNOTATION_SKIP_REASON,
    CLIENTLESS_ENGINES,
)
from kvpool_operator.injection import client_volume as client_parts
from kvpool_operator.injection.command_line import ContainerInfo, read_container
from kvpool_operator.injection.connector import compact
from kvpool_operator.injection.context import InjectionContext, InjectionSettings
from kvpool_operator.injection.engine_versions import is_known
from kvpool_operator.injection.engines import FAMILIES, family_of, suits
from kvpool_operator.injection.engines.dynamo import VOLUME as KVBM_VOLUME
from kvpool_operator.injection.flags import value_of
from kvpool_operator.injection.pod import Pod, named, notes_of, spec
from kvpool_operator.injection.revision import revision
from kvpool_operator.injection.skip import Skip, SkipReason

if TYPE_CHECKING:
    from kvpool_operator.injection.annotations import InjectionRequest

__all__ = ["Injected", "InjectionSettings", "inject", "is_injected", "mark_skipped"]

_BY_FLAGS: Final = frozenset({"sglang", "lmcache"})
"""Families without a plug-in that could look at the engine's version before anything else."""
_FLAGS: Final = ("--kv-transfer-config", "--l2-adapter", "--hicache-storage-backend-extra-config")
_ENV: Final = ("PYTHONPATH", "PYTHONHASHSEED", "LMCACHE_REMOTE_STORAGE_PLUGINS", "LMCACHE_EXTRA_CONFIG")
_ENV_PREFIXES: Final = ("KVPOOL_", "DYN_KVBM_")


@dataclass(frozen=True)
class Injected:
    """The changed pod, and what its owner should hear (shown by kubectl)."""

    pod: Pod
    warnings: list[str] = field(default_factory=list)


def inject(pod: Pod, wishes: InjectionRequest, injection: InjectionSettings) -> Injected:
    """The pod with the pool in it. Skip says why it must stay as it is."""
    pod = copy.deepcopy(pod)
    again = is_injected(pod)
    container, reading = _engine_container(pod, wishes)
    family = family_of(wishes.engine, reading)
    if family not in FAMILIES:
        raise Skip(SkipReason.UNSUPPORTED_ENGINE, f"the engine of container {container.get('name')} is not known here")
    if wishes.engine == "auto" and family in _BY_FLAGS and not again and not is_known(family, reading.version):
        told = ".".join(map(str, reading.version or ()))
        raise Skip(
            SkipReason.UNSUPPORTED_ENGINE,
            f"the image of container {container.get('name')} says {reading.engine} {told}, which the client does not "
            f"know and which might not start; set {ANNOTATION_ENGINE}: {family} to have it tried",
        )
    target = InjectionContext(pod, container, reading, wishes, injection, again)
    if family not in CLIENTLESS_ENGINES:
        client_parts.add(target)
    warnings = FAMILIES[family](target)
    notes = notes_of(pod)
    notes.pop(ANNOTATION_SKIP_REASON, None)
    notes[ANNOTATION_POOL] = injection.pool
    notes[ANNOTATION_INJECTED_ENGINE] = family
    if not again:  # what an earlier pass told it stays
        notes[ANNOTATION_INJECTED_REVISION] = revision(
            family,
            client_config=injection.client_config,
            block_tokens=injection.block_tokens,
            host_memory_bytes=injection.host_memory_bytes,
            kvbm_host_bytes=injection.kvbm_host_bytes,
            kvbm_disk_bytes=injection.kvbm_disk_bytes,
        )
    notes[ANNOTATION_INJECTED] = _digest(pod, container)
    return Injected(pod, [] if again else warnings)


def mark_skipped(pod: Pod, skip: Skip) -> Pod:
    """The pod with the reason in an annotation; one that an earlier pass injected stays as it is."""
    if is_injected(pod):
        return pod
    pod = copy.deepcopy(pod)
    notes = notes_of(pod)
    notes.pop(ANNOTATION_INJECTED, None)
    notes.pop(ANNOTATION_INJECTED_ENGINE, None)
    notes.pop(ANNOTATION_INJECTED_REVISION, None)
    notes[ANNOTATION_SKIP_REASON] = str(skip)
    return pod


def is_injected(pod: Pod) -> bool:
    """Whether an earlier pass did its work: the annotation is there, and the client or KVBM's directory."""
    notes = (pod.get("metadata") or {}).get("annotations") or {}
    if ANNOTATION_INJECTED not in notes:
        return False
    if notes.get(ANNOTATION_INJECTED_ENGINE) in CLIENTLESS_ENGINES:
        return _has_kvbm(pod)
    return named(spec(pod).get("initContainers"), client_parts.INIT_CONTAINER) is not None


def _has_kvbm(pod: Pod) -> bool:
    variables = [e for c in spec(pod).get("containers") or [] for e in c.get("env") or []]
    return named(spec(pod).get("volumes"), KVBM_VOLUME) is not None or any(
        str(e.get("name", "")).startswith("DYN_KVBM_") for e in variables
    )


def _carries(container: dict[str, Any]) -> bool:
    """Whether an earlier pass gave this container the client or KVBM's settings."""
    mounts = {str(m.get("name", "")) for m in container.get("volumeMounts") or []}
    settings = [e for e in container.get("env") or [] if str(e.get("name", "")).startswith("DYN_KVBM_")]
    return bool(mounts & {client_parts.VOLUME, KVBM_VOLUME} or settings)


def _engine_container(pod: Pod, wishes: InjectionRequest) -> tuple[dict[str, Any], ContainerInfo]:
    """The container that the annotation names, else the one that fits best; of equals the first."""
    if ((spec(pod).get("os") or {}).get("name") or "linux") != "linux":
        raise Skip(SkipReason.UNSUPPORTED_ENGINE, "the pool serves Linux pods only")
    containers = spec(pod).get("containers") or []
    if wishes.container:
        chosen = named(containers, wishes.container)
        if chosen is None:
            raise Skip(
                SkipReason.CONTAINER_NOT_FOUND,
                f"annotation {ANNOTATION_CONTAINER} names {wishes.container!r}, which the pod does not have",
            )
        containers = [chosen]
    if not containers:
        raise Skip(SkipReason.CONTAINER_NOT_FOUND, "the pod has no container")
    if is_injected(pod):  # the one that an earlier pass chose, whatever it looks like by now
        containers = [c for c in containers if _carries(c)] or containers
    readings = [(c, read_container(c)) for c in containers]
    best = max(readings, key=lambda pair: suits(wishes.engine, pair[1]))
    if suits(wishes.engine, best[1]):
        return best
    if wishes.engine == "auto":
        raise Skip(
            SkipReason.UNSUPPORTED_ENGINE,
            "no container starts an engine that is known (vllm serve, sglang serve, lmcache server, their modules, an "
            f"image of vLLM); if one does, set {ANNOTATION_ENGINE} and {ANNOTATION_CONTAINER}: <its name>",
        )
    return readings[0]


def _digest(pod: Pod, container: dict[str, Any]) -> str:
    """Over what the pod now carries, so that a second pass finds the same."""
    env = {str(e.get("name")): e.get("value") for e in container.get("env") or []}
    words = [str(w) for name in ("command", "args") for w in container.get(name) or []]
    init = named(spec(pod).get("initContainers"), client_parts.INIT_CONTAINER) or {}
    notes = notes_of(pod)
    carried = {
        "pool": notes[ANNOTATION_POOL],
        "family": notes[ANNOTATION_INJECTED_ENGINE],
        "container": container.get("name"),
        "image": init.get("image"),
        "env": {n: v for n, v in env.items() if n in _ENV or n.startswith(_ENV_PREFIXES)},
        "flags": [value[1] for flag in _FLAGS if (value := value_of(words, flag)) is not None],
    }
    return hashlib.sha256(compact(carried).encode()).hexdigest()[:16]
