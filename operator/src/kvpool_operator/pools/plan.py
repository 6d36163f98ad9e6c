"""What to do next for one pool: the difference between what should be and what is. Pure.

`plan` keeps a living pool as its spec says; `plan_cleanup` takes a deleted one apart, stage by stage. Both only look at
what is there now, so they can be asked again at any moment and after any interruption.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvpool_operator.api.annotations import ANNOTATION_WIPED, FINALIZER_CLEANUP, LABEL_RETAINED
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
    """Server-side apply. `new`: it was not there, so somebody else's object of that name must not be taken over."""

    manifest: Manifest
    new: bool = False


@dataclass(frozen=True)
class Prune:
    """Delete. Foreground: the object goes after its pods."""

    target: ObjectRef
    uid: str
    foreground: bool = False


@dataclass(frozen=True)
class SetLabel:
    """Set a label of an object, or take it away (None)."""

    target: ObjectRef
    label: str
    value: str | None


@dataclass(frozen=True)
class PatchMetadata:
    """Merge patch on the pool's own metadata, refused if the pool changed since it was read."""

    metadata: Manifest


@dataclass(frozen=True)
class EmitEvent:
    """An Event about the pool."""

    reason: str
    message: str
    warning: bool = False


Action = Apply | Prune | SetLabel | PatchMetadata | EmitEvent


@dataclass(frozen=True)
class Plan:
    """Actions in order, and what is waited for after them (empty: nothing)."""

    actions: tuple[Action, ...] = ()
    waiting: str = ""
    done: bool = field(default=False)
    """The pool is gone after these actions: there is no status to write."""


def plan(meta: Metadata, wanted: Sequence[Manifest], observed: Snapshot) -> Plan:
    """Keep a living pool as its spec says. Empty when everything is as it should be."""
    if FINALIZER_CLEANUP not in meta.finalizers:
        # first of all: nothing is made that would not be cleaned up
        return _with_finalizer(meta)
    refs = {ref(m) for m in wanted}
    kept = ObjectRef("Secret", meta.namespace, names.secret(meta.name))
    surplus = [r for r in observed.objects if r not in refs and r != kept]
    adopted = [SetLabel(r, LABEL_RETAINED, None) for r, o in observed.objects.items() if _is_kept(o)]
    used = [] if _has_rolled(meta, wanted, observed) else [r for r in surplus if r.name == names.index(meta.name)]
    surplus = [r for r in surplus if r not in used]
    return Plan(
        (*adopted, *_applies(wanted, observed), *_prunes(surplus, observed)),
        waiting="every sidecar to use the other index" if used else "",
    )


def _has_rolled(meta: Metadata, wanted: Sequence[Manifest], observed: Snapshot) -> bool:
    """Whether every sidecar runs as it should: none reads the former configuration, and its index, any more."""
    target = ObjectRef("DaemonSet", meta.namespace, names.sidecar(meta.name))
    live = observed.objects.get(target)
    manifest = next((m for m in wanted if ref(m) == target), None)
    if live is None or manifest is None:
        return True
    status = live.get("status") or {}
    updated, desired = status.get("updatedNumberScheduled", 0), status.get("desiredNumberScheduled", 0)
    return is_up_to_date(live, manifest) and _is_current(live) and updated >= desired


def plan_during_preflight(
    meta: Metadata, wanted: Sequence[Manifest], looks: Sequence[Manifest], observed: Snapshot, waiting: str
) -> Plan:
    """While the nodes are looked at: everything but the sidecars, and nothing goes.

    Sidecars that run keep the configuration and the passwords they run with: one that restarts must not find others,
    nor one that reads them anew.
    """
    if FINALIZER_CLEANUP not in meta.finalizers:
        return _with_finalizer(meta)
    sidecars = ObjectRef("DaemonSet", meta.namespace, names.sidecar(meta.name))
    left = {sidecars}
    if sidecars in observed.objects:
        read = {
            ObjectRef("ConfigMap", meta.namespace, names.config(meta.name)),
            ObjectRef("Secret", meta.namespace, names.secret(meta.name)),
        }
        left |= read & observed.objects.keys()
    refs = {ref(m) for m in wanted}
    now = [m for m in wanted if ref(m) not in left] + [m for m in looks if ref(m) not in refs]
    adopted = [SetLabel(r, LABEL_RETAINED, None) for r, o in observed.objects.items() if _is_kept(o)]
    return Plan((*adopted, *_applies(now, observed)), waiting=waiting)


def plan_dry_run(
    meta: Metadata, shown: Manifest, looks: Sequence[Manifest] | None, observed: Snapshot, waiting: str
) -> Plan:
    """Only `shown`, which says what would be done, and what looks at the nodes; that goes when it has (None)."""
    if FINALIZER_CLEANUP not in meta.finalizers:
        return _with_finalizer(meta)
    actions = _applies([*(looks or ()), shown], observed)
    if looks is None:
        actions += _prunes([r for r in observed.objects if _is_look(r, observed)], observed)
    return Plan(tuple(actions), waiting=waiting)


def summarize_changes(meta: Metadata, wanted: Sequence[Manifest], observed: Snapshot) -> dict[str, list[str]]:
    """What `plan` would do with which objects: create, change, keep, delete."""
    told: dict[str, list[str]] = {"create": [], "change": [], "keep": [], "delete": []}
    for manifest in wanted:
        live = observed.objects.get(ref(manifest))
        what = "create" if live is None else "keep" if is_up_to_date(live, manifest) else "change"
        told[what].append(str(ref(manifest)))
    refs = {ref(m) for m in wanted}
    kept = {ObjectRef("Secret", meta.namespace, names.secret(meta.name))}
    kept |= {r for r in observed.objects if _is_look(r, observed) or r.name == names.rendered(meta.name)}
    told["delete"] = [str(r) for r in sorted(observed.objects) if r not in refs and r not in kept]
    return told


def plan_cleanup(
    meta: Metadata,
    policy: str,
    wipe: Sequence[Manifest] | None,
    observed: Snapshot,
    *,
    overdue: bool,
) -> Plan:
    """Take a deleted pool apart.

    `wipe`: what removes the blocks from the nodes (None: it cannot be made). `overdue`: the deadline has passed, so
    nothing is waited for any longer. Where the blocks stay, the Secret that names them stays, with a label.
    """
    if FINALIZER_CLEANUP not in meta.finalizers:
        return Plan(done=True)
    wiping = policy == "Delete" and ANNOTATION_WIPED not in (observed.raw["metadata"].get("annotations") or {})
    if wiping and not overdue:
        return _wipe(meta, wipe, observed)
    secret_ref = ObjectRef("Secret", meta.namespace, names.secret(meta.name))
    keeps = policy != "Delete" and not observed.namespace_terminating
    actions: list[Action] = []
    if wiping:
        actions.append(EmitEvent("CleanupTimedOut", _left_behind(meta, observed), warning=True))
    if keeps and secret_ref in observed.objects and not _is_kept(observed.objects[secret_ref]):
        actions.append(SetLabel(secret_ref, LABEL_RETAINED, "true"))
    rest = [r for r in observed.objects if not (keeps and r == secret_ref)]
    actions += _prunes(rest, observed)
    if rest and not overdue:
        return Plan(tuple(actions), waiting=summarize(sorted(rest)))
    if rest and not wiping:
        actions.append(
            EmitEvent("CleanupTimedOut", f"gave up waiting for {summarize(sorted(rest))} to go", warning=True)
        )
    return Plan((*actions, _without_finalizer(meta)), done=True)


def _wipe(meta: Metadata, wipe: Sequence[Manifest] | None, observed: Snapshot) -> Plan:
    """The servers go first, so that nothing writes behind the wipe's back; then every node is wiped."""
    if wipe is None or observed.namespace_terminating:
        why = "the namespace is being deleted" if observed.namespace_terminating else "its spec cannot be understood"
        return Plan(
            (EmitEvent("WipeSkipped", f"blocks stay on the nodes: {why}", warning=True), PatchMetadata(_marked())),
            waiting="",
        )
    servers = ObjectRef("DaemonSet", meta.namespace, names.sidecar(meta.name))
    if servers in observed.objects:
        return Plan(tuple(_prunes([servers], observed)), waiting="the sidecars to stop")
    actions = _applies(wipe, observed)
    if actions:
        return Plan(tuple(actions), waiting="the wipe to start")
    status = (observed.object("DaemonSet", names.wipe(meta.name)) or {}).get("status") or {}
    nodes, wiped = status.get("desiredNumberScheduled", 0), status.get("numberReady", 0)
    if not _is_current(observed.object("DaemonSet", names.wipe(meta.name))) or wiped < nodes:
        return Plan(waiting=f"the wipe of {nodes - wiped} of {nodes} nodes")
    return Plan((PatchMetadata(_marked()),), waiting="the objects to go")


def _applies(wanted: Sequence[Manifest], observed: Snapshot) -> list[Action]:
    actions: list[Action] = []
    for manifest in wanted:
        live = observed.objects.get(ref(manifest))
        if live is None or not is_up_to_date(live, manifest):
            actions.append(Apply(manifest, new=live is None))
    return actions


def _prunes(refs: Sequence[ObjectRef], observed: Snapshot) -> list[Action]:
    """What is going already is left to go."""
    return [
        Prune(r, observed.objects[r]["metadata"].get("uid", ""), foreground=r.kind in ("DaemonSet", "StatefulSet"))
        for r in sorted(refs)
        if "deletionTimestamp" not in observed.objects[r]["metadata"]
    ]


def _is_current(daemonset: Manifest | None) -> bool:
    """Whether the DaemonSet's status speaks of its present spec."""
    if daemonset is None:
        return False
    seen = (daemonset.get("status") or {}).get("observedGeneration", 0)
    return bool(seen >= daemonset["metadata"].get("generation", 1))


def _is_look(target: ObjectRef, observed: Snapshot) -> bool:
    """Whether it is there for a look at the nodes alone. An NFS volume is, where no sidecar runs."""
    meta = observed.raw["metadata"]
    if target.kind in ("PersistentVolume", "PersistentVolumeClaim"):
        return ObjectRef("DaemonSet", meta.get("namespace", ""), names.sidecar(meta["name"])) not in observed.objects
    return target.name == names.preflight(meta["name"]) and target.kind in (
        "DaemonSet",
        "ConfigMap",
        "NetworkPolicy",
        "Secret",
    )


def _with_finalizer(meta: Metadata) -> Plan:
    return Plan((PatchMetadata({"finalizers": [*meta.finalizers, FINALIZER_CLEANUP]}),), waiting="the finalizer")


def _is_kept(manifest: Manifest) -> bool:
    """Whether a deleted pool left it behind."""
    return LABEL_RETAINED in (manifest["metadata"].get("labels") or {})


def _marked() -> Manifest:
    return {"annotations": {ANNOTATION_WIPED: "true"}}


def _without_finalizer(meta: Metadata) -> PatchMetadata:
    return PatchMetadata({"finalizers": [f for f in meta.finalizers if f != FINALIZER_CLEANUP]})


def _left_behind(meta: Metadata, observed: Snapshot) -> str:
    status = (observed.object("DaemonSet", names.wipe(meta.name)) or {}).get("status") or {}
    nodes, wiped = status.get("desiredNumberScheduled", 0), status.get("numberReady", 0)
    return (
        f"the deadline passed with {wiped} of {nodes} nodes wiped; "
        "blocks on the others stay until their directories are removed by hand"
    )
