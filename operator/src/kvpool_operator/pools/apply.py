"""Doing what a plan says. Nobody else writes to the cluster, but for the Lease in `leader.py` and `operations`."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

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

    from kvpool_operator.api.v1alpha1 import Metadata
    from kvpool_operator.k8s.client import ApiClient
    from kvpool_operator.pools.plan import Action

__all__ = ["ApplyResult", "apply_plan", "emit_event", "emit_pool_event", "evict_pod"]

log = logging.getLogger(__name__)

COMPONENT: Final = "kvpool-operator"
_ORDERED_KINDS: Final = frozenset({"Secret", "StatefulSet", "DaemonSet"})
"""Kinds that others rely on, or that rely on others."""


@dataclass(frozen=True)
class ApplyResult:
    """What came of a plan."""

    applied: tuple[ObjectRef, ...] = ()
    pruned: tuple[ObjectRef, ...] = ()
    rejections: tuple[str, ...] = field(default=())
    """What the API server refused, in its words."""


async def apply_plan(plan: Plan, meta: Metadata, cluster: ApiClient) -> ApplyResult:
    """Every action in order; neighbours that do not rely on each other together. One that is refused does not keep the
    others from being done; errors that may pass by themselves end the pass, which is then repeated."""
    applied: list[ObjectRef] = []
    pruned: list[ObjectRef] = []
    rejections: list[str] = []
    for together in _groups(plan.actions):
        # all are waited for: nothing goes on behind the back of a pass that has ended
        ends = await asyncio.gather(*(_execute(a, meta, cluster) for a in together), return_exceptions=True)
        for action, end in zip(together, ends, strict=True):
            if isinstance(end, RejectedError):
                log.warning("pool=%s/%s: %s", meta.namespace, meta.name, end)
                rejections.append(str(end))
            elif end is None:
                _record(action, meta, applied, pruned)
        failed = next((e for e in ends if e is not None and not isinstance(e, RejectedError)), None)
        if failed is not None:
            raise failed
        if ends[0] is not None and _is_prerequisite(together[0], meta):
            break
    return ApplyResult(tuple(applied), tuple(pruned), tuple(rejections))


def _groups(actions: Sequence[Action]) -> list[list[Action]]:
    groups: list[list[Action]] = []
    for action in actions:
        apart = not isinstance(action, Apply) or action.manifest["kind"] in _ORDERED_KINDS
        before = groups[-1][-1] if groups else None
        if apart or not isinstance(before, Apply) or before.manifest["kind"] in _ORDERED_KINDS:
            groups.append([])
        groups[-1].append(action)
    return groups


def _is_prerequisite(action: Action, meta: Metadata) -> bool:
    """Whether what follows relies on this."""
    kept = ObjectRef("Secret", meta.namespace, names.secret(meta.name))
    return isinstance(action, PatchMetadata) or (isinstance(action, Apply) and ref(action.manifest) == kept)


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
                log.info("%s was made anew in between", target)
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
            raise ConflictError(f"{target} is gone") from None
        raise


async def _create_or_update(manifest: Manifest, meta: Metadata, cluster: ApiClient) -> None:
    """Make what was not there. An object of that name that is not this pool's stays as it is."""
    target = ref(manifest)
    there = await cluster.get(target)
    if there is not None and not is_ours(there, meta.name):
        raise RejectedError(f"{target} exists and is not this pool's: delete or rename it, or name the pool otherwise")
    if target.kind == "Secret" and there is None:
        await cluster.create(manifest)  # random values: of two who make it, one must lose
    else:
        await cluster.apply(manifest)


async def emit_pool_event(event: EmitEvent, meta: Metadata, cluster: ApiClient) -> None:
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
    about: Manifest, reason: str, message: str, cluster: ApiClient, *, warning: bool, name: str = ""
) -> None:
    """An Event about an object (its reference). With a name of its own it is made once, whoever makes it."""
    now = rfc3339(datetime.now(UTC))
    called = {"name": name} if name else {"generateName": f"{about['name']}.", "name": ""}
    manifest = {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {**called, "namespace": about["namespace"]},
        "involvedObject": about,
        "type": "Warning" if warning else "Normal",
        "reason": reason,
        "message": message[:1000],
        "source": {"component": COMPONENT},
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    }
    try:
        await cluster.create(manifest)
    except ConflictError:
        pass  # it was told of before
    except NotLeaderError:
        raise
    except OperatorError as e:  # an Event is a courtesy: nothing waits for it
        log.info("no Event %s: %s", reason, e)


def _record(action: Action, meta: Metadata, applied: list[ObjectRef], pruned: list[ObjectRef]) -> None:
    if isinstance(action, Apply):
        applied.append(ref(action.manifest))
        log.info("pool=%s/%s: applied %s", meta.namespace, meta.name, applied[-1])
    elif isinstance(action, Prune):
        pruned.append(action.target)
        log.info("pool=%s/%s: deleted %s", meta.namespace, meta.name, action.target)
