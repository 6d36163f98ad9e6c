"""Engine pods that opted in to a pool, and the state of each: injected, skipped, not injected, outdated. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

from kvpool_operator.api.annotations import (
    ANNOTATION_INJECTED,
    ANNOTATION_INJECTED_ENGINE,
    ANNOTATION_INJECTED_REVISION,
    ANNOTATION_INJECTION_WARNINGS,
    ANNOTATION_POOL,
    ANNOTATION_SELECTED_BY,
    ANNOTATION_SKIP_REASON,
    CLIENTLESS_ENGINES,
    LABEL_INJECT,
)
from kvpool_operator.injection.client_volume import INIT_CONTAINER
from kvpool_operator.injection.skip import SkipReason
from kvpool_operator.k8s.pods import is_ready, ready_since

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping
    from datetime import datetime

__all__ = ["OPTED_IN", "EnginePod", "EnginePods", "Owner", "count", "find_orphans", "slim_engine_pod"]

OPTED_IN: Final = f"{LABEL_INJECT}=true"
"""Label selector of opted-in pods."""
_METADATA: Final = ("namespace", "name", "uid", "resourceVersion", "deletionTimestamp")
_MAX_SKIP: Final = 800
_ANNOTATIONS: Final = (
    ANNOTATION_INJECTED,
    ANNOTATION_INJECTED_ENGINE,
    ANNOTATION_INJECTED_REVISION,
    ANNOTATION_INJECTION_WARNINGS,
    ANNOTATION_POOL,
    ANNOTATION_SELECTED_BY,
    ANNOTATION_SKIP_REASON,
)
_PULL_FAILURES: Final = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull", "InvalidImageName", "ImageInspectError"}
)


@dataclass(frozen=True)
class Owner:
    """The controller that created a pod, and recreates it."""

    kind: str
    name: str
    uid: str
    api_version: str = ""


@dataclass(frozen=True)
class EnginePod:
    """One pod that has not terminated."""

    namespace: str
    name: str
    uid: str
    state: Literal["injected", "skipped", "not_injected"]
    outdated: str = ""
    """The outdated part of an injected pod: `client`, `configuration`, or empty."""
    owner: Owner | None = None
    ready: bool = False
    leaving: bool = False
    """It is being deleted: it counts for its owner's availability only."""
    skip: str = ""
    """Why it was skipped: the reason, a colon, and a sentence."""
    node: str = ""
    ready_since: datetime | None = None
    selected_by: str = ""
    """What selected a pod without the opt-in label of its own: `namespace`, `pool`, or empty."""
    warnings: str = ""
    """What the injected pod does not get, and why."""
    waits_for_image: str = ""
    """Image of the client that cannot be pulled, with the kubelet's reason."""
    has_client: bool = True
    """Its engine connects to a sidecar; false for an engine without an interface for a remote tier."""

    @property
    def full_name(self) -> str:
        """namespace/name"""
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True)
class EnginePods:
    """Number of pods of one pool by state; `..._names` hold a few names for messages."""

    injected: int = 0
    skipped: int = 0
    not_injected: int = 0
    outdated: int = 0
    not_injected_names: tuple[str, ...] = ()
    alone: int = 0
    """Injected pods whose engine has no interface for a remote tier."""
    alone_names: tuple[str, ...] = ()
    skip_reasons: Mapping[str, int] = field(default_factory=dict)
    """Number of skipped pods by reason."""
    names: Mapping[str, str] = field(default_factory=dict)
    """namespace/name of the injected pods, by uid."""
    pods: tuple[EnginePod, ...] = ()
    """All of them, and those that are being deleted, sorted by namespace and name."""

    @property
    def selected(self) -> int:
        return self.injected + self.skipped + self.not_injected


def count(
    pods: Iterable[dict[str, Any]], namespace: str, name: str, sidecar_image: str, revisions: Mapping[str, str]
) -> EnginePods:
    """Count the opted-in pods, of any namespace, that select the pool `namespace/name`.

    An injected pod names its pool as `namespace/name`. The annotation of other pods is that, a bare name, or absent,
    which selects a pool of their own namespace. `revisions`: current revision by engine kind.
    """
    selected_pods = []
    alone = []
    for pod in pods:
        metadata = pod.get("metadata") or {}
        if (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed"):
            continue
        notes = metadata.get("annotations") or {}
        selected, own = notes.get(ANNOTATION_POOL, ""), metadata.get("namespace") == namespace
        if not (selected == f"{namespace}/{name}" or selected == name or (not selected and own)):
            continue
        engine_pod = _engine_pod(pod, metadata, notes, sidecar_image, revisions)
        selected_pods.append(engine_pod)
        if (
            engine_pod.state == "injected"
            and not engine_pod.leaving
            and notes.get(ANNOTATION_INJECTED_ENGINE) in CLIENTLESS_ENGINES
        ):
            alone.append(engine_pod.full_name)
    selected_pods.sort(key=lambda p: (p.namespace, p.name))
    staying = [p for p in selected_pods if not p.leaving]
    not_injected = [p.full_name for p in staying if p.state == "not_injected"]
    return EnginePods(
        injected=sum(p.state == "injected" for p in staying),
        skipped=sum(p.state == "skipped" for p in staying),
        not_injected=len(not_injected),
        outdated=sum(bool(p.outdated) for p in staying),
        not_injected_names=tuple(not_injected[:3]),
        alone=len(alone),
        alone_names=tuple(sorted(alone)[:3]),
        skip_reasons=dict(sorted(Counter(_skip_reason(p.skip) for p in staying if p.state == "skipped").items())),
        names={p.uid: p.full_name for p in staying if p.state == "injected"},
        pods=tuple(selected_pods),
    )


def find_orphans(
    pods: Iterable[dict[str, Any]], pools: Collection[tuple[str, str]], watched: Collection[str] = ()
) -> list[tuple[EnginePod, str]]:
    """Return the opted-in pods that select none of `pools` (namespace, name), with the pool that they select.

    `watched`: the namespaces whose pools are known, empty: all. Pools of other namespaces are taken to exist.
    """
    names, namespaces = {name for _, name in pools}, {namespace for namespace, _ in pools}
    found = []
    for pod in pods:
        metadata = pod.get("metadata") or {}
        if (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed"):
            continue
        notes = metadata.get("annotations") or {}
        selected, own = str(notes.get(ANNOTATION_POOL, "")), str(metadata.get("namespace", ""))
        namespace, slash, name = selected.partition("/")
        is_there = selected in names if selected else own in namespaces
        if slash:
            is_there = (namespace, name) in pools or bool(watched and namespace not in watched)
        elif watched and selected:
            is_there = True  # a bare name may be that of a pool elsewhere
        engine_pod = _engine_pod(pod, metadata, notes, "", {})
        if not is_there and not engine_pod.leaving:
            pool = f"the pool {selected[:128]}" if selected else f"a pool of its namespace {own}"
            found.append((engine_pod, pool))
    return sorted(found, key=lambda one: (one[0].namespace, one[0].name))


def slim_engine_pod(pod: dict[str, Any]) -> dict[str, Any]:
    """The part of an opted-in pod that is counted: there may be thousands of them."""
    metadata, status = pod["metadata"], pod.get("status") or {}
    notes = metadata.get("annotations") or {}
    return {
        "metadata": {
            **{k: metadata[k] for k in _METADATA if k in metadata},
            "annotations": {k: notes[k] for k in _ANNOTATIONS if k in notes},
            "ownerReferences": [o for o in metadata.get("ownerReferences") or [] if o.get("controller") is True],
        },
        "spec": {
            **({"initContainers": [{"name": INIT_CONTAINER, "image": image}]} if (image := _client_image(pod)) else {}),
            **({"nodeName": node} if (node := (pod.get("spec") or {}).get("nodeName")) else {}),
        },
        "status": {
            "phase": status.get("phase"),
            **({"initContainerStatuses": waiting} if (waiting := _waiting_client(status)) else {}),
            "conditions": [
                {k: c[k] for k in ("type", "status", "lastTransitionTime") if k in c}
                for c in status.get("conditions") or []
                if c.get("type") == "Ready"
            ],
        },
    }


def _engine_pod(
    pod: dict[str, Any],
    metadata: dict[str, Any],
    notes: dict[str, str],
    sidecar_image: str,
    revisions: Mapping[str, str],
) -> EnginePod:
    injected = ANNOTATION_INJECTED in notes
    return EnginePod(
        namespace=str(metadata.get("namespace", "")),
        name=str(metadata.get("name", "")),
        uid=str(metadata.get("uid", "")),
        state="injected" if injected else "skipped" if ANNOTATION_SKIP_REASON in notes else "not_injected",
        outdated=_outdated(pod, notes, sidecar_image, revisions) if injected else "",
        owner=_owner(metadata),
        ready=is_ready(pod),
        leaving="deletionTimestamp" in metadata,
        skip="" if injected else str(notes.get(ANNOTATION_SKIP_REASON, ""))[:_MAX_SKIP],
        node=str((pod.get("spec") or {}).get("nodeName") or ""),
        ready_since=ready_since(pod),
        warnings=str(notes.get(ANNOTATION_INJECTION_WARNINGS, ""))[:_MAX_SKIP] if injected else "",
        waits_for_image=_waits_for_image(pod),
        selected_by=str(notes.get(ANNOTATION_SELECTED_BY, "")),
        has_client=notes.get(ANNOTATION_INJECTED_ENGINE) not in CLIENTLESS_ENGINES,
    )


def _skip_reason(skip: str) -> str:
    """Return a reason of the webhook, whatever the annotation says."""
    reason = skip.partition(":")[0]
    return reason if reason in set(SkipReason) else "other"


def _outdated(pod: dict[str, Any], notes: dict[str, str], image: str, revisions: Mapping[str, str]) -> str:
    if _client_image(pod) not in ("", image):
        return "client"
    # pods of releases without the annotation are recognized by their image
    injected, current = (
        notes.get(ANNOTATION_INJECTED_REVISION),
        revisions.get(notes.get(ANNOTATION_INJECTED_ENGINE, "")),
    )
    return "configuration" if injected and current and injected != current else ""


def _owner(metadata: dict[str, Any]) -> Owner | None:
    for o in metadata.get("ownerReferences") or []:
        if o.get("controller") is True:
            return Owner(*(str(o.get(key, "")) for key in ("kind", "name", "uid", "apiVersion")))
    return None


def _waiting_client(status: dict[str, Any]) -> list[dict[str, Any]]:
    """The status of the client's init container while it waits, without its message."""
    for one in status.get("initContainerStatuses") or []:
        reason = ((one.get("state") or {}).get("waiting") or {}).get("reason")
        if one.get("name") == INIT_CONTAINER and reason in _PULL_FAILURES:
            return [{"name": INIT_CONTAINER, "state": {"waiting": {"reason": reason}}}]
    return []


def _waits_for_image(pod: dict[str, Any]) -> str:
    waiting = _waiting_client(pod.get("status") or {})
    return f"{_client_image(pod)} ({waiting[0]['state']['waiting']['reason']})" if waiting else ""


def _client_image(pod: dict[str, Any]) -> str:
    inits = (pod.get("spec") or {}).get("initContainers") or []
    return next((str(c.get("image", "")) for c in inits if c.get("name") == INIT_CONTAINER), "")
