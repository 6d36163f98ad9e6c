"""Selection of the pool of a pod. Precedence: annotation of the pod, selectors of pools, annotation of the namespace.

A pod takes part if its label says so, if a pool selects it, or if its namespace has the opt-in label. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypeVar

from kvpool_operator.api.annotations import (
    ANNOTATION_POOL,
    ANNOTATION_SELECTED_BY,
    LABEL_INJECT,
    NAMESPACE_OPT_IN,
    OPT_OUT,
)
from kvpool_operator.injection.annotations import parse_pool
from kvpool_operator.injection.pod import annotations_of
from kvpool_operator.injection.skip import Skip, SkipReason
from kvpool_operator.k8s.selectors import matches

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvpool_operator.injection.annotations import InjectionRequest
    from kvpool_operator.injection.pod import Pod

__all__ = ["ENGINE_WORDS", "NamespaceView", "SelectablePool", "SelectedBy", "choose", "mark_selected", "select"]

ENGINE_WORDS: Final = (
    *("vllm", "sglang", "lmcache", "dynamo", "llm-d", "huggingfaceserver", "ray-llm", "trtllm", "tensorrt_llm"),
)
"""A container without any of these words in its image, command and arguments runs no engine. The chart's webhook for
namespaces matches pods by them, so that other pods do not wait for the webhook."""

SelectedBy = Literal["", "label", "pool", "namespace"]


class SelectablePool(Protocol):
    """Fields of a pool that the selection reads."""

    @property
    def namespace(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def key(self) -> str:
        """namespace/name"""
        ...

    @property
    def enabled(self) -> bool: ...
    @property
    def pod_selector(self) -> Mapping[str, Any] | None: ...

    def allows(self, namespace: str, labels: Mapping[str, str]) -> bool:
        """Whether the pool allows pods of this namespace."""
        ...


P = TypeVar("P", bound=SelectablePool)


@dataclass(frozen=True)
class NamespaceView:
    """Labels and annotations of the namespace of a pod."""

    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)

    @property
    def opted_in(self) -> bool:
        """Whether the engine pods of the namespace are injected."""
        return self.labels.get(LABEL_INJECT) in NAMESPACE_OPT_IN

    @property
    def opted_out(self) -> bool:
        """Whether only pods with the label are injected."""
        return self.labels.get(LABEL_INJECT) in OPT_OUT


def select(
    pools: Sequence[P], request: InjectionRequest, namespace: str, view: NamespaceView
) -> tuple[SelectedBy, P | None]:
    """Return what selects the pod, an empty string if nothing does, and its pool.

    Raises Skip, with `selected_by`, if something selects the pod but no single pool.
    """
    selecting = [] if view.opted_out else [p for p in pools if _selects(p, request, namespace, view)]
    by: SelectedBy = "label" if request.opted_in else "pool" if selecting else "namespace" if view.opted_in else ""
    if not by:
        return by, None
    try:
        return by, _pool(pools, selecting, request, namespace, view)
    except Skip as skip:
        skip.selected_by = by
        raise


def _selects(pool: SelectablePool, request: InjectionRequest, namespace: str, view: NamespaceView) -> bool:
    selector = pool.pod_selector
    return (
        selector is not None
        and pool.enabled
        and matches(selector, request.labels)
        and pool.allows(namespace, view.labels)
    )


def _pool(
    pools: Sequence[P], selecting: Sequence[P], request: InjectionRequest, namespace: str, view: NamespaceView
) -> P:
    if request.pool_name:
        return choose(pools, request, namespace, view.labels)
    if len(selecting) == 1:
        return selecting[0]
    if selecting:
        keys = ", ".join(sorted(p.key for p in selecting)[:5])
        raise Skip(
            SkipReason.POOL_AMBIGUOUS,
            f"spec.injection.selector of several pools ({keys}) selects the pod; set annotation {ANNOTATION_POOL} to "
            "one, or change a selector",
        )
    named = view.annotations.get(ANNOTATION_POOL, "")
    if named:
        try:
            pool_namespace, pool_name = parse_pool(named)
        except Skip as skip:
            raise Skip(skip.reason, f"namespace {namespace}: {skip.message}") from None
        request = replace(request, pool_namespace=pool_namespace, pool_name=pool_name)
    return choose(pools, request, namespace, view.labels)


def choose(pools: Sequence[P], request: InjectionRequest, namespace: str, labels: Mapping[str, str]) -> P:
    """Return the pool for a pod of `namespace` that no pool selects, or raise Skip.

    `namespace/name` selects that pool. A name alone selects the pool in the pod's namespace, otherwise the only pool of
    that name that allows the pod. Without a name, the only pool of the pod's namespace, otherwise the only pool that
    allows the pod, is selected.
    """
    requested = "/".join(p for p in (request.pool_namespace, request.pool_name) if p)
    candidates = [p for p in pools if not request.pool_name or p.name == request.pool_name]
    found = [p for p in candidates if p.namespace == (request.pool_namespace or namespace)]
    if not found and not request.pool_namespace:
        found = candidates
    if not found:
        what = f"there is no KVCachePool {requested}" if requested else "there is no KVCachePool yet"
        raise Skip(SkipReason.POOL_NOT_FOUND, f"{what}; create it, or correct annotation {ANNOTATION_POOL}")
    allowing = [p for p in found if p.allows(namespace, labels)]
    if not allowing:
        raise Skip(
            SkipReason.NAMESPACE_NOT_ALLOWED,
            f"spec.injection.allowedNamespaces of {requested or 'every pool'} does not allow namespace {namespace}",
        )
    enabled = [p for p in allowing if p.enabled]
    if not enabled:
        raise Skip(SkipReason.INJECTION_DISABLED, f"spec.injection.enabled of {allowing[0].key} is false")
    if len(enabled) > 1:
        keys = ", ".join(sorted(p.key for p in enabled)[:5])
        raise Skip(SkipReason.POOL_AMBIGUOUS, f"several pools match ({keys}); set annotation {ANNOTATION_POOL} to one")
    return enabled[0]


def mark_selected(pod: Pod, by: SelectedBy) -> None:
    """Label a pod that its namespace or a pool selected, in place: agents and the operator watch pods by the label."""
    if by in ("namespace", "pool"):
        annotations_of(pod)[ANNOTATION_SELECTED_BY] = by
        metadata = pod["metadata"]
        metadata["labels"] = (metadata.get("labels") or {}) | {LABEL_INJECT: "true"}
