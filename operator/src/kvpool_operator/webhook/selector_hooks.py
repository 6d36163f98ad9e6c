"""Webhooks for `spec.injection.selector`: one for each set of namespaces of a pool, in a configuration of their own.

The API server matches pods by these selectors itself, so pods that no pool selects never wait for the webhook.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any, Final, Protocol

from kvpool_operator.api.annotations import ANNOTATION_SELECTED_BY, LABEL_INJECT, OPT_OUT

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvpool_operator.webhook.pool_cache import PoolCache, PoolView

__all__ = ["UNLABELED", "HookStore", "SelectorHooks", "selector_hooks"]

log = logging.getLogger(__name__)

TEMPLATE: Final = "pods.kvpool.dev"
"""The chart's webhook, from which rules, timeout, service, trust and excluded namespaces are taken."""
UNLABELED: Final = {
    "name": "has-no-label",
    "expression": (
        f"object.metadata.?labels[?'{LABEL_INJECT}'].orValue('') != 'true' || "
        f"object.metadata.?annotations[?'{ANNOTATION_SELECTED_BY}'].hasValue()"
    ),
}
"""A pod with a label of its own is the chart's webhook's."""
MAX_HOOKS: Final = 200
"""The API server reads all of them for every new pod."""
RECHECK_S: Final = 60.0
_NAME: Final = "kubernetes.io/metadata.name"
_NOT_EXCLUDED: Final = {"key": LABEL_INJECT, "operator": "NotIn", "values": list(OPT_OUT)}


class HookStore(Protocol):
    """Access to the two configurations."""

    async def read_configuration(self) -> dict[str, Any] | None:
        """Return the chart's MutatingWebhookConfiguration as JSON, or None."""
        ...

    async def read_selector_configuration(self) -> dict[str, Any] | None:
        """Return the configuration for selectors as JSON, or None."""
        ...

    async def write_selector_webhooks(self, webhooks: list[dict[str, Any]], resource_version: str) -> None:
        """Replace its webhooks. ConflictError if it has another version."""
        ...


def selector_hooks(template: Mapping[str, Any], pools: Sequence[PoolView]) -> list[dict[str, Any]]:
    """Return the webhooks of all pools with a selector, sorted by name, at most MAX_HOOKS."""
    found = [
        hook for pool in pools if pool.enabled and pool.pod_selector is not None for hook in _of_pool(template, pool)
    ]
    found.sort(key=lambda hook: str(hook["name"]))
    if len(found) > MAX_HOOKS:
        log.warning("%d webhooks for selectors of pools; the first %d are registered", len(found), MAX_HOOKS)
    return found[:MAX_HOOKS]


def _of_pool(template: Mapping[str, Any], pool: PoolView) -> list[dict[str, Any]]:
    excluded = [*_requirements(template.get("namespaceSelector") or {}), _NOT_EXCLUDED]
    pods = {"matchExpressions": [*_requirements(pool.pod_selector or {}), _NOT_EXCLUDED]}
    namespaces = {"own": [{"key": _NAME, "operator": "In", "values": [pool.namespace]}]}
    if pool.allowed_from == "Selector":
        others = {"key": _NAME, "operator": "NotIn", "values": [pool.namespace]}
        namespaces["allowed"] = [*_requirements(pool.allowed_selector), others]
    return [
        {
            **template,
            "failurePolicy": "Ignore",  # these pods did not ask for the pool themselves
            "name": f"{part}.{pool.name}.{pool.namespace}.{TEMPLATE}",
            "objectSelector": pods,
            "namespaceSelector": {"matchExpressions": [*excluded, *requirements]},
            "matchConditions": [UNLABELED],
        }
        for part, requirements in namespaces.items()
    ]


def _requirements(selector: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a label selector as expressions only, without empty lists, as the API server stores it."""
    labels = sorted((selector.get("matchLabels") or {}).items())
    expressions = selector.get("matchExpressions") or []
    return [{"key": k, "operator": "In", "values": [v]} for k, v in labels] + [
        {k: v for k, v in e.items() if v not in (None, [])} for e in expressions
    ]


class SelectorHooks:
    """Keeps the configuration for selectors up to date. Any number of replicas can run it."""

    def __init__(
        self,
        store: HookStore,
        pools: PoolCache,
        *,
        poll_s: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._pools = pools
        self._poll_s = poll_s
        self._clock = clock
        self._applied: Sequence[PoolView] | None = None
        self._checked_at = float("-inf")

    async def run(self) -> None:
        """Repeat until cancelled. Failures are logged, and the API server keeps the last selectors."""
        while True:
            try:
                await self.step()
            except Exception as e:
                log.warning("cannot update the webhooks for selectors of pools (%s)", e)
            await asyncio.sleep(self._poll_s)

    async def step(self) -> None:
        """Write what differs, if the pools have changed or were not compared for RECHECK_S."""
        pools = [p for p in self._pools.pools if p.pod_selector is not None]
        is_recent = self._clock() - self._checked_at < RECHECK_S
        if not self._pools.synced or (is_recent and pools == self._applied):
            return
        present = await self._store.read_selector_configuration()
        hooks = (await self._store.read_configuration() or {}).get("webhooks") or []
        template: dict[str, Any] = next((h for h in hooks if h.get("name") == TEMPLATE), {})
        is_trusted = bool((template.get("clientConfig") or {}).get("caBundle"))
        if present is None or not is_trusted:
            if pools:
                log.warning("pods are not injected by selectors of pools: the webhook is not completely installed")
            return
        wanted = selector_hooks(template, pools)
        if wanted != (present.get("webhooks") or []):
            await self._store.write_selector_webhooks(wanted, str(present["metadata"].get("resourceVersion", "")))
            log.info("registered %d webhooks for selectors of pools", len(wanted))
        self._applied, self._checked_at = pools, self._clock()
