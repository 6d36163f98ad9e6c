"""Injection of the client and the engine settings into one pod. Pure: the input is not modified.

Everything that is added has a stable name and is added only if it is absent, so injection is idempotent and keeps the
user's settings. `injection.engines` has the settings of each engine kind.
"""

from __future__ import annotations

import copy
import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from kvpool_operator.api.annotations import (
    ANNOTATION_INJECTED,
    ANNOTATION_INJECTED_ENGINE,
    ANNOTATION_INJECTED_REVISION,
    ANNOTATION_INJECTION_WARNINGS,
    ANNOTATION_POOL,
    ANNOTATION_SKIP_REASON,
    CLIENTLESS_ENGINES,
    ENGINE_KINDS,
)
from kvpool_operator.desired.users import FIRST_USER, LAST_USER
from kvpool_operator.injection import client_volume
from kvpool_operator.injection.connector import compact
from kvpool_operator.injection.context import InjectionContext, InjectionSettings
from kvpool_operator.injection.engine_containers import find_engines
from kvpool_operator.injection.engines import HOST_TIER_ENGINES, INJECTORS, engine_kind
from kvpool_operator.injection.engines.dynamo import VOLUME as KVBM_VOLUME
from kvpool_operator.injection.pod import Pod, all_containers, annotations_of, find_by_name, sandbox_warnings, spec
from kvpool_operator.injection.revision import revision
from kvpool_operator.injection.skip import Skip, SkipReason
from kvpool_operator.injection.suitability import doubts, refuse_unsuitable

if TYPE_CHECKING:
    from kvpool_operator.injection.annotations import InjectionRequest
    from kvpool_operator.injection.engine_containers import EngineContainer

__all__ = ["Injected", "InjectionSettings", "inject", "is_injected", "mark_skipped"]

_ENV: Final = ("PYTHONPATH", "PYTHONHASHSEED", "VLLM_PLUGINS", "LMCACHE_REMOTE_STORAGE_PLUGINS", "LMCACHE_EXTRA_CONFIG")
MAX_WARNINGS: Final = 2000
"""Characters of the annotation."""
_ENV_PREFIXES: Final = ("KVPOOL_", "DYN_KVBM_")


@dataclass(frozen=True)
class Injected:
    """Injected pod, and admission warnings."""

    pod: Pod
    warnings: list[str] = field(default_factory=list)


def inject(pod: Pod, request: InjectionRequest, settings: InjectionSettings) -> Injected:
    """Return the pod with its engine containers injected. Raises Skip with the reason if none can be.

    If some of several engine containers cannot be injected, the warnings name them.
    """
    pod = copy.deepcopy(pod)
    is_reinvocation = is_injected(pod)
    # a reinvocation keeps the choice of the earlier one, even if a container has changed
    engines = find_engines(pod, request, _is_injected_container if is_reinvocation else None)
    with_tier = sum(engine_kind(request.engine, e.info) in HOST_TIER_ENGINES for e in engines)
    kinds: dict[EngineContainer, str] = {}
    skipped: dict[EngineContainer, Skip] = {}
    warnings: list[str] = []
    for engine in engines:
        changed = copy.deepcopy(pod)
        context = InjectionContext(
            changed, engine.of(changed), engine.info, request, settings, is_reinvocation, max(1, with_tier)
        )
        try:
            kinds[engine] = _inject_container(context)
            warnings += INJECTORS[kinds[engine]](context)
            warnings += doubts(context.container, kinds[engine], engine.info)
        except Skip as skip:
            kinds.pop(engine, None)
            skipped[engine] = skip
        else:
            pod = changed
    if not kinds:
        raise skipped[max(skipped, key=lambda e: e.score)]
    _refuse_reserved_user(pod)
    warnings += [*_left_out(skipped, kinds), *sandbox_warnings(pod)]
    kind = min(kinds.values(), key=ENGINE_KINDS.index)
    containers = [e.of(pod) for e in kinds]
    with_client = [e.of(pod) for e, k in kinds.items() if k not in CLIENTLESS_ENGINES]
    if with_client:
        client_volume.add_init_container(pod, settings, with_client[0])
    annotations = annotations_of(pod)
    annotations.pop(ANNOTATION_SKIP_REASON, None)
    annotations[ANNOTATION_POOL] = settings.pool
    annotations[ANNOTATION_INJECTED_ENGINE] = kind
    if not is_reinvocation:  # an earlier invocation decided the settings
        annotations[ANNOTATION_INJECTED_REVISION] = revision(
            kind,
            client_config=settings.client_config,
            block_tokens=settings.block_tokens,
            host_memory_bytes=settings.host_memory_bytes,
            kvbm_host_bytes=settings.kvbm_host_bytes,
            kvbm_disk_bytes=settings.kvbm_disk_bytes,
        )
        annotations.pop(ANNOTATION_INJECTION_WARNINGS, None)
        if warnings:
            annotations[ANNOTATION_INJECTION_WARNINGS] = "; ".join(warnings)[:MAX_WARNINGS]
    annotations[ANNOTATION_INJECTED] = _digest(pod, containers)
    return Injected(pod, [] if is_reinvocation else warnings)


def _inject_container(context: InjectionContext) -> str:
    """Add the client to one container, unless its engine cannot use it. Return the kind of the engine."""
    request, info = context.request, context.info
    kind = engine_kind(request.engine, info)
    is_decided = context.is_reinvocation or request.engine != "auto"
    refuse_unsuitable(context.container, kind, info, is_decided=is_decided)
    if kind not in CLIENTLESS_ENGINES:
        client_volume.inject_client(context)
    return kind


def _left_out(skipped: dict[EngineContainer, Skip], kinds: dict[EngineContainer, str]) -> list[str]:
    """Return a warning for each engine container without the pool. One that uses an injected LMCache server has it."""
    has_server = "lmcache" in kinds.values()
    return [
        f"engine container {engine.name} runs without the pool: {skip.message}"
        for engine, skip in skipped.items()
        if not (has_server and "LMCacheMPConnector" in engine.info.connectors)
    ]


def _refuse_reserved_user(pod: Pod) -> None:
    """A pod with a sidecar's user could use up what the kernel lets that user hold."""
    parts = [spec(pod), *all_containers(pod)]
    users = [(part.get("securityContext") or {}).get("runAsUser") for part in parts]
    for user in users:
        if isinstance(user, int) and FIRST_USER <= user <= LAST_USER:
            raise Skip(
                SkipReason.USER_RESERVED,
                f"the pod runs as user {user}; {FIRST_USER} to {LAST_USER} are reserved for sidecars: set another "
                "runAsUser",
            )


def mark_skipped(pod: Pod, skip: Skip) -> Pod:
    """Return the pod with the reason in an annotation. A pod that is already injected is returned unchanged."""
    if is_injected(pod):
        return pod
    pod = copy.deepcopy(pod)
    annotations = annotations_of(pod)
    annotations.pop(ANNOTATION_INJECTED, None)
    annotations.pop(ANNOTATION_INJECTED_ENGINE, None)
    annotations.pop(ANNOTATION_INJECTED_REVISION, None)
    annotations.pop(ANNOTATION_INJECTION_WARNINGS, None)
    annotations[ANNOTATION_SKIP_REASON] = str(skip)
    return pod


def is_injected(pod: Pod) -> bool:
    """Whether an earlier invocation injected the pod: it has the annotation, and the client or KVBM settings."""
    annotations = (pod.get("metadata") or {}).get("annotations") or {}
    if ANNOTATION_INJECTED not in annotations:
        return False
    if annotations.get(ANNOTATION_INJECTED_ENGINE) in CLIENTLESS_ENGINES:
        return _has_kvbm(pod)
    return find_by_name(spec(pod).get("initContainers"), client_volume.INIT_CONTAINER) is not None


def _has_kvbm(pod: Pod) -> bool:
    variables = [e for c in all_containers(pod) for e in c.get("env") or []]
    return find_by_name(spec(pod).get("volumes"), KVBM_VOLUME) is not None or any(
        str(e.get("name", "")).startswith("DYN_KVBM_") for e in variables
    )


def _is_injected_container(container: dict[str, Any]) -> bool:
    """Whether an earlier invocation added the client or KVBM settings to this container."""
    mounts = {str(m.get("name", "")) for m in container.get("volumeMounts") or []}
    settings = [e for e in container.get("env") or [] if str(e.get("name", "")).startswith("DYN_KVBM_")]
    return bool(mounts & {client_volume.VOLUME, KVBM_VOLUME} or settings)


def _digest(pod: Pod, containers: list[dict[str, Any]]) -> str:
    """Digest of the injected settings, equal for every invocation."""
    init = find_by_name(spec(pod).get("initContainers"), client_volume.INIT_CONTAINER) or {}
    annotations = annotations_of(pod)
    first, *further = [_carried(c) for c in containers]
    carried = {
        "pool": annotations[ANNOTATION_POOL],
        "family": annotations[ANNOTATION_INJECTED_ENGINE],
        "image": init.get("image"),
        **first,
        **({"further": further} if further else {}),
    }
    return hashlib.sha256(compact(carried).encode()).hexdigest()[:16]


def _carried(container: dict[str, Any]) -> dict[str, Any]:
    env = {str(e.get("name")): e.get("value") for e in container.get("env") or []}
    return {
        "container": container.get("name"),
        "env": {n: v for n, v in env.items() if n in _ENV or n.startswith(_ENV_PREFIXES)},
    }
