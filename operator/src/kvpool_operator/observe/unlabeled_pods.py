"""Engine pods without the opt-in label that their namespace or a pool selects.

The webhook labels what it sees, so these pods were created while it was unavailable, or before they were selected.
They are listed periodically: unlike labeled pods, no watch selects them.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, Final

from kvpool_operator.api.annotations import (
    ANNOTATION_POOL,
    ANNOTATION_SELECTED_BY,
    LABEL_INJECT,
    OPT_OUT,
)
from kvpool_operator.api.v1alpha1 import KIND
from kvpool_operator.errors import OperatorError
from kvpool_operator.injection.annotations import parse_annotations
from kvpool_operator.injection.engine_containers import has_engine
from kvpool_operator.injection.pool_selection import NamespaceView, select
from kvpool_operator.injection.skip import Skip
from kvpool_operator.k8s.reflector import Lister
from kvpool_operator.observe.engine_pods import slim_engine_pod
from kvpool_operator.webhook.pool_cache import pool_view

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from kvpool_operator.k8s.client import ApiClient, Manifest
    from kvpool_operator.webhook.pool_cache import PoolView

__all__ = ["AllEnginePods", "UnlabeledPods"]

log = logging.getLogger(__name__)

INTERVAL_S: Final = 15.0
_UNLABELED: Final = f"{LABEL_INJECT} notin ({','.join(['true', *OPT_OUT])})"


class UnlabeledPods:
    """Lists the pods; `pods` are those of the last time, reduced as labeled ones, with the annotation of their pool."""

    def __init__(
        self,
        cluster: ApiClient,
        namespaces: Lister,
        watched: Collection[str] = (),
        interval_s: float = INTERVAL_S,
    ) -> None:
        """`watched`: the only namespaces in which pods may be listed; empty: all."""
        self.pods: Sequence[Manifest] = ()
        self._cluster = cluster
        self._namespaces = namespaces
        self._watched = watched
        self._interval_s = interval_s

    async def run(self) -> None:
        """Repeat until cancelled. After a failure, which is logged, the last pods are used."""
        while True:
            try:
                await self.refresh()
            except OperatorError as e:
                log.warning("cannot list the pods that namespaces and pools select (%s)", e)
            await asyncio.sleep(self._interval_s)

    async def refresh(self) -> None:
        """List once. Without a selector and a namespace with the label, only the pools are listed."""
        pools = [v for raw in await self._cluster.list(KIND) if (v := pool_view(raw)) is not None]
        views = {
            str(n["metadata"]["name"]): NamespaceView(
                n["metadata"].get("labels") or {}, n["metadata"].get("annotations") or {}
            )
            for n in self._namespaces.list()
        }
        found = {}
        for namespace, labels in sorted(self._queries(pools, views)):
            for pod in await self._cluster.list("Pod", namespace=namespace, labels=labels):
                view = views.get(str(pod["metadata"].get("namespace", "")), NamespaceView())
                slim = _selected(pod, pools, view)
                if slim is not None:
                    found[str(pod["metadata"].get("uid", ""))] = slim
        self.pods = tuple(found.values())

    def _queries(self, pools: Sequence[PoolView], views: Mapping[str, NamespaceView]) -> set[tuple[str, str]]:
        """Return namespace and label selector of the lists to make."""
        queries = {(name, _UNLABELED) for name, view in views.items() if view.opted_in}
        for pool in pools:
            if pool.pod_selector is not None and pool.enabled:
                labels = f"{_text(pool.pod_selector)},{_UNLABELED}"
                allowed = [n for n, view in views.items() if pool.allows(n, view.labels) and not view.opted_out]
                queries |= {(name, labels) for name in allowed}
        return {(n, labels) for n, labels in queries if not self._watched or n in self._watched}


class AllEnginePods(Lister):
    """Labeled pods of a reflector, and unlabeled ones."""

    def __init__(self, labeled: Lister, unlabeled: UnlabeledPods) -> None:
        self._labeled = labeled
        self._unlabeled = unlabeled

    def get(self, namespace: str, name: str) -> Manifest | None:
        """The labeled pod; None if there is none."""
        return self._labeled.get(namespace, name)

    def list(self, namespace: str = "", labels: Mapping[str, str] | None = None) -> list[Manifest]:
        """All of them, by namespace (empty: all). Only labeled ones have labels."""
        found = self._labeled.list(namespace, labels)
        if labels:
            return found
        return [*found, *(p for p in self._unlabeled.pods if namespace in ("", p["metadata"].get("namespace")))]


def _selected(pod: Manifest, pools: Sequence[PoolView], view: NamespaceView) -> Manifest | None:
    """Return the reduced pod with its pool; None if nothing selects it, or no engine is recognized."""
    try:
        if not has_engine(pod):
            return None
        by, pool = select(pools, parse_annotations(pod), str(pod["metadata"].get("namespace", "")), view)
    except Skip:
        return None  # a new pod says why
    if pool is None:
        return None
    slim: dict[str, Any] = slim_engine_pod(pod)
    slim["metadata"]["annotations"] |= {ANNOTATION_POOL: pool.key, ANNOTATION_SELECTED_BY: by}
    return slim


def _text(selector: Mapping[str, Any]) -> str:
    """Return a label selector in the form of a query."""
    parts = [f"{k}={v}" for k, v in sorted((selector.get("matchLabels") or {}).items())]
    for e in selector.get("matchExpressions") or []:
        key, values = e["key"], ",".join(e.get("values") or [])
        form = {"In": f"{key} in ({values})", "NotIn": f"{key} notin ({values})", "Exists": key}
        parts.append(form.get(e["operator"], f"!{key}"))
    return ",".join(parts)
