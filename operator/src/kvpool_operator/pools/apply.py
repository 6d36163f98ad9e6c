"""Executes the plan of a pool. Other writers: `nodes.writer`, `operations`, and the helpers in `k8s`."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from kvpool_operator.api.findings.codes import Code
from kvpool_operator.api.v1alpha1 import API_VERSION, KIND
from kvpool_operator.desired import names
from kvpool_operator.desired.labels import is_ours
from kvpool_operator.errors import ConflictError, NotLeaderError, OperatorError, RejectedError
from kvpool_operator.k8s.client import Manifest, ObjectRef, ref
from kvpool_operator.k8s.diff import with_applied_hash
from kvpool_operator.pools.plan import Apply, EmitEvent, PatchMetadata, Plan, Prune, SetLabel
from kvpool_operator.times import rfc3339

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpool_operator.api.reasons import EventReason
    from kvpool_operator.api.v1alpha1 import Metadata
    from kvpool_operator.k8s.client import ApiClient
    from kvpool_operator.pools.plan import Action

__all__ = ["ApplyResult", "apply_plan", "emit_event", "emit_pool_event", "evict_pod"]

log = logging.getLogger(__name__)

COMPONENT: Final = "kvpool-operator"
_ORDERED_KINDS: Final = frozenset({"Secret", "StatefulSet", "DaemonSet"})
"""Kinds that other objects depend on, or that depend on others: applied one by one, in order."""


@dataclass(frozen=True)
class ApplyResult:
    """Result of a plan."""

    applied: tuple[ObjectRef, ...] = ()
    pruned: tuple[ObjectRef, ...] = ()
    rejections: tuple[str, ...] = field(default=())
    """Messages of the API server about objects that it rejected."""


async def apply_plan(plan: Plan, meta: Metadata, cluster: ApiClient) -> ApplyResult:
    """Execute every action in order; neighbors that do not depend on each other concurrently.

    A rejected action does not stop the others. Retryable errors end the reconcile, which is then repeated.
    """
    applied: list[ObjectRef] = []
    pruned: list[ObjectRef] = []
    rejections: list[str] = []
    for group in _groups(plan.actions):
        # wait for all, so that nothing runs on after the reconcile has ended
        results = await asyncio.gather(*(_execute(a, meta, cluster) for a in group), return_exceptions=True)
        for action, result in zip(group, results, strict=True):
            if isinstance(result, RejectedError):
                log.warning("pool=%s/%s: %s [%s]", meta.namespace, meta.name, result, Code.REJECTED.value)
                rejections.append(str(result))
            elif result is None:
                _record(action, meta, applied, pruned)
        failed = next((e for e in results if e is not None and not isinstance(e, RejectedError)), None)
        if failed is not None:
            raise failed
        if results[0] is not None and _is_prerequisite(group[0], meta):
            break
    return ApplyResult(tuple(applied), tuple(pruned), tuple(rejections))


def _groups(actions: Sequence[Action]) -> list[list[Action]]:
    groups: list[list[Action]] = []
    for action in actions:
        is_ordered = not isinstance(action, Apply) or action.manifest["kind"] in _ORDERED_KINDS
        previous = groups[-1][-1] if groups else None
        if is_ordered or not isinstance(previous, Apply) or previous.manifest["kind"] in _ORDERED_KINDS:
            groups.append([])
        groups[-1].append(action)
    return groups


def _is_prerequisite(action: Action, meta: Metadata) -> bool:
    """Whether the following actions depend on this one."""
    secret = ObjectRef("Secret", meta.namespace, names.secret(meta.name))
    return isinstance(action, PatchMetadata) or (isinstance(action, Apply) and ref(action.manifest) == secret)


async def _execute(action: Action, meta: Metadata, cluster: ApiClient) -> None:
    match action:
        case Apply(manifest=manifest, new=True):
            await _create_or_update(with_applied_hash(manifest), meta, cluster)
        case Apply(manifest=manifest):
            await cluster.apply(with_applied_hash(manifest))
        case Prune(target=target, uid=uid, foreground=foreground):
            try:
                await cluster.delete(target, uid=uid, foreground=foreground)
            except ConflictError:
                log.info("%s was recreated meanwhile, so it is not deleted", target)
        case SetLabel(target=target, label=label, value=value):
            await cluster.patch(target, {"metadata": {"labels": {label: value}}})
        case PatchMetadata(metadata=metadata):
            await _patch_pool({"metadata": {"resourceVersion": meta.resource_version, **metadata}}, meta, cluster)
        case EmitEvent():
            await emit_pool_event(action, meta, cluster)


async def _patch_pool(patch: Manifest, meta: Metadata, cluster: ApiClient) -> None:
    target = ObjectRef(KIND, meta.namespace, meta.name)
    try:
        await cluster.patch(target, patch)
    except RejectedError as e:
        if e.status == 404:
            raise ConflictError(f"{target} no longer exists") from None
        raise


async def _create_or_update(manifest: Manifest, meta: Metadata, cluster: ApiClient) -> None:
    """Create an object. An existing object of that name that is not this pool's is left unchanged."""
    target = ref(manifest)
    live = await cluster.get(target)
    if live is not None and not is_ours(live, meta.name):
        raise RejectedError(
            f"{target} exists and is not this pool's: delete or rename it, or choose another name for the pool"
        )
    if target.kind == "Secret" and live is None:
        await cluster.create(manifest)  # random values: of two writers, one must fail
    else:
        await cluster.apply(manifest)


async def emit_pool_event(event: EmitEvent, meta: Metadata, cluster: ApiClient) -> None:
    """Emit an Event about the pool."""
    about = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "namespace": meta.namespace,
        "name": meta.name,
        "uid": meta.uid,
    }
    await emit_event(about, event.reason, event.message, cluster, warning=event.warning)


async def evict_pod(target: ObjectRef, uid: str, cluster: ApiClient) -> None:
    """Evict an engine pod, as `kubectl drain` does. See `ApiClient.evict` for the errors."""
    await cluster.evict(target, uid=uid)


async def emit_event(
    about: Manifest, reason: EventReason, message: str, cluster: ApiClient, *, warning: bool, name: str = ""
) -> None:
    """Emit an Event about an object (its reference). With `name` it is created only once, by any process."""
    now = rfc3339(datetime.now(UTC))
    naming = {"name": name} if name else {"generateName": f"{about['name']}.", "name": ""}
    manifest = {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {**naming, "namespace": about["namespace"]},
        "involvedObject": about,
        "type": "Warning" if warning else "Normal",
        "reason": str(reason),
        "message": message[:1000],
        "source": {"component": COMPONENT},
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    }
    try:
        await cluster.create(manifest)
    except ConflictError:
        pass  # emitted before
    except NotLeaderError:
        raise
    except OperatorError as e:  # nothing depends on an Event
        log.info("Event %s was not emitted: %s", reason, e)


def _record(action: Action, meta: Metadata, applied: list[ObjectRef], pruned: list[ObjectRef]) -> None:
    if isinstance(action, Apply):
        applied.append(ref(action.manifest))
        log.info("pool=%s/%s: applied %s", meta.namespace, meta.name, applied[-1])
    elif isinstance(action, Prune):
        pruned.append(action.target)
        log.info("pool=%s/%s: deleted %s", meta.namespace, meta.name, action.target)
