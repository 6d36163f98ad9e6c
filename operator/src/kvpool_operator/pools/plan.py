"""Plans the next actions for one pool: the difference between the desired and the live objects. Pure.

`plan` is for a living pool, `plan_cleanup` deletes the objects of a deleted pool in stages. Both depend on the snapshot
only, so they can be repeated at any moment and after any interruption.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvpool_operator.api.annotations import ANNOTATION_WIPED, FINALIZER_CLEANUP, LABEL_RETAINED
from kvpool_operator.api.reasons import EventReason
from kvpool_operator.desired import names
from kvpool_operator.k8s.client import ObjectRef, ref
from kvpool_operator.k8s.diff import is_up_to_date
from kvpool_operator.text import summarize

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpool_operator.api.v1alpha1 import Metadata
    from kvpool_operator.k8s.client import Manifest
    from kvpool_operator.observe.snapshot import Snapshot

__all__ = [
    "Action",
    "Apply",
    "EmitEvent",
    "PatchMetadata",
    "Plan",
    "Prune",
    "SetLabel",
    "plan",
    "plan_cleanup",
    "plan_dry_run",
    "plan_during_preflight",
    "summarize_changes",
]


@dataclass(frozen=True)
class Apply:
    """Server-side apply. `new`: the object did not exist, so an object of that name that is not ours must stay."""

    manifest: Manifest
    new: bool = False


@dataclass(frozen=True)
class Prune:
    """Delete. Foreground: the object is deleted after its pods."""

    target: ObjectRef
    uid: str
    foreground: bool = False


@dataclass(frozen=True)
class SetLabel:
    """Set a label of an object, or remove it (None)."""

    target: ObjectRef
    label: str
    value: str | None


@dataclass(frozen=True)
class PatchMetadata:
    """Merge patch of the pool's own metadata; it fails if the pool changed since it was read."""

    metadata: Manifest


@dataclass(frozen=True)
class EmitEvent:
    """An Event about the pool."""

    reason: EventReason
    message: str
    warning: bool = False


Action = Apply | Prune | SetLabel | PatchMetadata | EmitEvent


@dataclass(frozen=True)
class Plan:
    """Actions in order, and what the next step waits for (empty: nothing)."""

    actions: tuple[Action, ...] = ()
    waiting: str = ""
    done: bool = field(default=False)
    """After these actions the pool no longer exists: there is no status to write."""


def plan(meta: Metadata, wanted: Sequence[Manifest], snapshot: Snapshot) -> Plan:
    """Plan for a living pool; empty if the live objects match the desired ones."""
    if FINALIZER_CLEANUP not in meta.finalizers:
        # first, so that everything created later is cleaned up
        return _with_finalizer(meta)
    refs = {ref(m) for m in wanted}
    secret = ObjectRef("Secret", meta.namespace, names.secret(meta.name))
    surplus = [r for r in snapshot.objects if r not in refs and r != secret]
    unretained = [SetLabel(r, LABEL_RETAINED, None) for r, o in snapshot.objects.items() if _is_retained(o)]
    is_rolled_out = _is_rolled_out(meta, wanted, snapshot)
    in_use = [] if is_rolled_out else [r for r in surplus if r.name == names.index(meta.name)]
    surplus = [r for r in surplus if r not in in_use]
    return Plan(
        (*unretained, *_applies(wanted, snapshot), *_prunes(surplus, snapshot)),
        waiting="every sidecar to use the other index" if in_use else "",
    )


def _is_rolled_out(meta: Metadata, wanted: Sequence[Manifest], snapshot: Snapshot) -> bool:
    """Whether every sidecar runs the current configuration, so that none uses the previous index."""
    target = ObjectRef("DaemonSet", meta.namespace, names.sidecar(meta.name))
    live = snapshot.objects.get(target)
    manifest = next((m for m in wanted if ref(m) == target), None)
    if live is None or manifest is None:
        return True
    status = live.get("status") or {}
    updated, desired = status.get("updatedNumberScheduled", 0), status.get("desiredNumberScheduled", 0)
    return is_up_to_date(live, manifest) and _is_current(live) and updated >= desired


def plan_during_preflight(
    meta: Metadata, wanted: Sequence[Manifest], checks: Sequence[Manifest], snapshot: Snapshot, waiting: str
) -> Plan:
    """While preflight checks run: apply everything but the sidecars, and delete nothing.

    Running sidecars keep their configuration and passwords: a restarted sidecar must not read changed ones.
    """
    if FINALIZER_CLEANUP not in meta.finalizers:
        return _with_finalizer(meta)
    sidecars = ObjectRef("DaemonSet", meta.namespace, names.sidecar(meta.name))
    left = {sidecars}
    if sidecars in snapshot.objects:
        read = {
            ObjectRef("ConfigMap", meta.namespace, names.config(meta.name)),
            ObjectRef("Secret", meta.namespace, names.secret(meta.name)),
        }
        left |= read & snapshot.objects.keys()
    refs = {ref(m) for m in wanted}
    now = [m for m in wanted if ref(m) not in left] + [m for m in checks if ref(m) not in refs]
    unretained = [SetLabel(r, LABEL_RETAINED, None) for r, o in snapshot.objects.items() if _is_retained(o)]
    return Plan((*unretained, *_applies(now, snapshot)), waiting=waiting)


def plan_dry_run(
    meta: Metadata, preview: Manifest, checks: Sequence[Manifest] | None, snapshot: Snapshot, waiting: str
) -> Plan:
    """Apply only `preview`, which lists the changes, and the preflight checks, which are deleted afterwards (None)."""
    if FINALIZER_CLEANUP not in meta.finalizers:
        return _with_finalizer(meta)
    actions = _applies([*(checks or ()), preview], snapshot)
    if checks is None:
        actions += _prunes([r for r in snapshot.objects if _is_preflight(r, snapshot)], snapshot)
    return Plan(tuple(actions), waiting=waiting)


def summarize_changes(meta: Metadata, wanted: Sequence[Manifest], snapshot: Snapshot) -> dict[str, list[str]]:
    """Objects by what `plan` would do with them: create, change, keep, delete."""
    changes: dict[str, list[str]] = {"create": [], "change": [], "keep": [], "delete": []}
    for manifest in wanted:
        live = snapshot.objects.get(ref(manifest))
        what = "create" if live is None else "keep" if is_up_to_date(live, manifest) else "change"
        changes[what].append(str(ref(manifest)))
    refs = {ref(m) for m in wanted}
    kept = {ObjectRef("Secret", meta.namespace, names.secret(meta.name))}
    kept |= {r for r in snapshot.objects if _is_preflight(r, snapshot) or r.name == names.plan(meta.name)}
    changes["delete"] = [str(r) for r in sorted(snapshot.objects) if r not in refs and r not in kept]
    return changes


def plan_cleanup(
    meta: Metadata,
    policy: str,
    wipe: Sequence[Manifest] | None,
    snapshot: Snapshot,
    *,
    overdue: bool,
) -> Plan:
    """Plan the deletion of a pool's objects.

    `wipe`: the objects that remove the blocks from the nodes (None: the spec is invalid). `overdue`: the cleanup
    timeout has passed, so nothing is waited for. If the blocks stay, the Secret that identifies them stays, labeled.
    """
    if FINALIZER_CLEANUP not in meta.finalizers:
        return Plan(done=True)
    wiping = policy == "Delete" and ANNOTATION_WIPED not in (snapshot.raw["metadata"].get("annotations") or {})
    if wiping and not overdue:
        return _wipe(meta, wipe, snapshot)
    secret_ref = ObjectRef("Secret", meta.namespace, names.secret(meta.name))
    keeps = policy != "Delete" and not snapshot.namespace_terminating
    actions: list[Action] = []
    if wiping:
        actions.append(EmitEvent(EventReason.CLEANUP_TIMED_OUT, _left_behind(meta, snapshot), warning=True))
    if keeps and secret_ref in snapshot.objects and not _is_retained(snapshot.objects[secret_ref]):
        actions.append(SetLabel(secret_ref, LABEL_RETAINED, "true"))
    rest = [r for r in snapshot.objects if not (keeps and r == secret_ref)]
    actions += _prunes(rest, snapshot)
    if rest and not overdue:
        return Plan(tuple(actions), waiting=summarize(sorted(rest)))
    if rest and not wiping:
        actions.append(
            EmitEvent(
                EventReason.CLEANUP_TIMED_OUT, f"these objects still exist: {summarize(sorted(rest))}", warning=True
            )
        )
    return Plan((*actions, _without_finalizer(meta)), done=True)


def _wipe(meta: Metadata, wipe: Sequence[Manifest] | None, snapshot: Snapshot) -> Plan:
    """Stop the sidecars first, so that nothing writes during the wipe; then wipe every node."""
    if wipe is None or snapshot.namespace_terminating:
        why = "the namespace is being deleted" if snapshot.namespace_terminating else "its spec is invalid"
        return Plan(
            (
                EmitEvent(EventReason.WIPE_SKIPPED, f"blocks stay on the nodes: {why}", warning=True),
                PatchMetadata(_wiped_annotation()),
            ),
            waiting="",
        )
    servers = ObjectRef("DaemonSet", meta.namespace, names.sidecar(meta.name))
    if servers in snapshot.objects:
        return Plan(tuple(_prunes([servers], snapshot)), waiting="the sidecars to stop")
    actions = _applies(wipe, snapshot)
    if actions:
        return Plan(tuple(actions), waiting="the wipe to start")
    status = (snapshot.object("DaemonSet", names.wipe(meta.name)) or {}).get("status") or {}
    nodes, wiped = status.get("desiredNumberScheduled", 0), status.get("numberReady", 0)
    if not _is_current(snapshot.object("DaemonSet", names.wipe(meta.name))) or wiped < nodes:
        return Plan(waiting=f"the wipe of {nodes - wiped} of {nodes} nodes")
    return Plan((PatchMetadata(_wiped_annotation()),), waiting="the objects to go")


def _applies(wanted: Sequence[Manifest], snapshot: Snapshot) -> list[Action]:
    actions: list[Action] = []
    for manifest in wanted:
        live = snapshot.objects.get(ref(manifest))
        if live is None or not is_up_to_date(live, manifest):
            actions.append(Apply(manifest, new=live is None))
    return actions


def _prunes(refs: Sequence[ObjectRef], snapshot: Snapshot) -> list[Action]:
    """Delete actions; objects that are being deleted already are left out."""
    return [
        Prune(r, snapshot.objects[r]["metadata"].get("uid", ""), foreground=r.kind in ("DaemonSet", "StatefulSet"))
        for r in sorted(refs)
        if "deletionTimestamp" not in snapshot.objects[r]["metadata"]
    ]


def _is_current(daemonset: Manifest | None) -> bool:
    """Whether the DaemonSet's status describes its current spec."""
    if daemonset is None:
        return False
    seen = (daemonset.get("status") or {}).get("observedGeneration", 0)
    return bool(seen >= daemonset["metadata"].get("generation", 1))


def _is_preflight(target: ObjectRef, snapshot: Snapshot) -> bool:
    """Whether the object is for preflight checks only. An NFS volume is, while no sidecar exists."""
    meta = snapshot.raw["metadata"]
    if target.kind in ("PersistentVolume", "PersistentVolumeClaim"):
        return ObjectRef("DaemonSet", meta.get("namespace", ""), names.sidecar(meta["name"])) not in snapshot.objects
    return target.name == names.preflight(meta["name"]) and target.kind in (
        "DaemonSet",
        "ConfigMap",
        "NetworkPolicy",
        "Secret",
    )


def _with_finalizer(meta: Metadata) -> Plan:
    return Plan((PatchMetadata({"finalizers": [*meta.finalizers, FINALIZER_CLEANUP]}),), waiting="the finalizer")


def _is_retained(manifest: Manifest) -> bool:
    """Whether a deleted pool left the object behind."""
    return LABEL_RETAINED in (manifest["metadata"].get("labels") or {})


def _wiped_annotation() -> Manifest:
    return {"annotations": {ANNOTATION_WIPED: "true"}}


def _without_finalizer(meta: Metadata) -> PatchMetadata:
    return PatchMetadata({"finalizers": [f for f in meta.finalizers if f != FINALIZER_CLEANUP]})


def _left_behind(meta: Metadata, snapshot: Snapshot) -> str:
    status = (snapshot.object("DaemonSet", names.wipe(meta.name)) or {}).get("status") or {}
    nodes, wiped = status.get("desiredNumberScheduled", 0), status.get("numberReady", 0)
    return (
        f"spec.cleanupTimeout passed with {wiped} of {nodes} nodes wiped; "
        "blocks on the others stay until you remove their directories by hand"
    )
