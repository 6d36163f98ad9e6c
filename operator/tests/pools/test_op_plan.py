"""Plans: empty when all is well, complete when it is not, and a deleted pool is taken apart in the right order."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from op_samples import ENV, SECRET, inputs, pool_manifest

from kvpool_operator.api.annotations import ANNOTATION_APPLIED_HASH, ANNOTATION_WIPED, FINALIZER_CLEANUP
from kvpool_operator.api.v1alpha1 import KVCachePool
from kvpool_operator.desired import Inputs, build
from kvpool_operator.desired.wipe import build_cleanup
from kvpool_operator.k8s.client import ObjectRef, ref
from kvpool_operator.k8s.diff import is_subset, is_up_to_date, with_applied_hash
from kvpool_operator.observe.snapshot import Snapshot
from kvpool_operator.pools.plan import (
    Apply,
    EmitEvent,
    PatchMetadata,
    Plan,
    Prune,
    SetLabel,
    plan,
    plan_cleanup,
)

if TYPE_CHECKING:
    from kvpool_operator.k8s.client import Manifest

POOL = KVCachePool.parse(pool_manifest())
META = POOL.metadata
DELETED = META.model_copy(update={"deletion_timestamp": "2026-11-20T10:00:00Z"})
WANTED = build(inputs())
WIPE = build_cleanup(Inputs(POOL, ENV, SECRET))
SIDECARS = ObjectRef("DaemonSet", "kvpool-system", "chat-sidecar")
WIPER = ObjectRef("DaemonSet", "kvpool-system", "chat-wipe")
SECRET_REF = ObjectRef("Secret", "kvpool-system", "chat-secret")


def live(manifest: Manifest, **status: Any) -> Manifest:
    """As the API server would hold it: stamped, with what it adds by itself."""
    out = with_applied_hash(manifest)
    out["metadata"] |= {"uid": f"uid-{out['metadata']['name']}", "generation": 1, "resourceVersion": "5"}
    if status:
        out["status"] = {"observedGeneration": 1, **status}
    return out


def observed(*objects: Manifest, **kwargs: Any) -> Snapshot:
    return Snapshot(raw=pool_manifest(), objects={ref(o): o for o in objects}, **kwargs)


def kinds(steps: Plan) -> list[str]:
    return [type(a).__name__ for a in steps.actions]


def test_nothing_is_made_before_the_finalizer_is_there():
    bare = META.model_copy(update={"finalizers": ["somebody/else"]})
    assert plan(bare, WANTED, observed()).actions == (
        PatchMetadata({"finalizers": ["somebody/else", FINALIZER_CLEANUP]}),
    )


def test_a_new_pool_gets_everything_in_order():
    steps = plan(META, WANTED, observed())
    assert [a.manifest for a in steps.actions if isinstance(a, Apply)] == WANTED
    assert all(isinstance(a, Apply) and a.new for a in steps.actions)


def test_the_plan_is_empty_when_everything_is_as_it_should_be():
    assert plan(META, WANTED, observed(*map(live, WANTED))) == Plan()


@given(st.integers(0, len(WANTED) - 1))
def test_one_missing_object_is_made(i: int):
    there = [live(m) for j, m in enumerate(WANTED) if j != i]
    assert plan(META, WANTED, observed(*there)).actions == (Apply(WANTED[i], new=True),)


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if isinstance(value, dict):
        return [p for k, v in value.items() for p in leaves(v, (*path, k))]
    if isinstance(value, list):
        return [p for i, v in enumerate(value) for p in leaves(v, (*path, i))]
    return [path]


@given(st.data())
def test_whatever_is_changed_by_hand_is_applied_again(data: st.DataObject):
    i = data.draw(st.integers(0, len(WANTED) - 1))
    broken = live(WANTED[i])
    own = [p for p in leaves(WANTED[i]) if p not in (("metadata", "name"), ("metadata", "namespace"), ("kind",))]
    path = data.draw(st.sampled_from(own))
    spot = broken
    for key in path[:-1]:
        spot = spot[key]
    spot[path[-1]] = "changed by hand"
    there = [broken if j == i else live(m) for j, m in enumerate(WANTED)]
    assert plan(META, WANTED, observed(*there)).actions == (Apply(WANTED[i]),)


def test_what_is_not_wanted_any_more_is_pruned_but_never_the_secret():
    old = live({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "chat-old", "namespace": "kvpool-system"}})
    without_secret = [m for m in WANTED if m["metadata"]["name"] != "chat-secret"]
    steps = plan(META, without_secret, observed(*map(live, WANTED), old))
    assert steps.actions == (Prune(ref(old), "uid-chat-old"),)


def test_a_retained_secret_is_adopted():
    there = [live(m) for m in WANTED]
    secret = next(o for o in there if o["kind"] == "Secret")
    secret["metadata"]["labels"]["kvpool.dev/retained"] = "true"
    assert plan(META, WANTED, observed(*there)).actions == (SetLabel(SECRET_REF, "kvpool.dev/retained", None),)


def test_a_field_that_the_builder_dropped_is_applied_away():
    before = copy.deepcopy(WANTED[-1])
    before["spec"]["template"]["spec"]["priorityClassName"] = "old"
    assert is_subset(with_applied_hash(before), {k: v for k, v in WANTED[-1].items() if k != "metadata"})
    assert not is_up_to_date(live(before), WANTED[-1])


def test_what_others_add_does_not_matter():
    theirs = live(WANTED[-1])
    theirs["metadata"]["annotations"]["somebody"] = "else"
    container = theirs["spec"]["template"]["spec"]["containers"][0]
    container["env"].append({"name": "X", "value": "y"})
    container["terminationMessagePath"] = "/dev/termination-log"
    container["volumeMounts"].insert(0, {"name": "injected", "mountPath": "/x"})
    assert is_up_to_date(theirs, WANTED[-1])


@pytest.mark.parametrize(
    ("live_value", "wanted", "same"),
    [
        ({"a": 1, "b": 2}, {"a": 1}, True),
        ({"a": True}, {"a": 1}, False),
        ({}, {"a": None}, False),
        ([1, 2], [1], False),
        ([{"name": "b", "v": 1}, {"name": "a"}], [{"name": "a"}], True),
        ([{"name": "a", "v": 2}], [{"name": "a", "v": 1}], False),
        ("a", {"a": 1}, False),
        ([], [], True),
    ],
)
def test_covering(live_value: Any, wanted: Any, same: bool):
    assert is_subset(live_value, wanted) is same


def test_the_stamp_does_not_depend_on_the_order_of_keys():
    a = {"kind": "X", "metadata": {"name": "n"}, "data": {"a": "1", "b": "2"}}
    b = {"data": {"b": "2", "a": "1"}, "metadata": {"name": "n"}, "kind": "X"}
    assert (
        with_applied_hash(a)["metadata"]["annotations"][ANNOTATION_APPLIED_HASH]
        == with_applied_hash(b)["metadata"]["annotations"][ANNOTATION_APPLIED_HASH]
    )
    assert "annotations" not in a["metadata"]


# -- deletion ---------------------------------------------------------------------------------------------------------


def cleanup(policy: str, seen: Snapshot, *, overdue: bool = False, wipe: Any = WIPE) -> Plan:
    return plan_cleanup(DELETED, policy, wipe, seen, overdue=overdue)


def test_without_our_finalizer_a_deletion_is_not_ours():
    assert plan_cleanup(META.model_copy(update={"finalizers": []}), "Delete", WIPE, observed(), overdue=False).done


def test_retain_marks_the_secret_prunes_the_rest_and_waits_for_it():
    steps = cleanup("Retain", observed(*map(live, WANTED)))
    assert steps.actions[0] == SetLabel(SECRET_REF, "kvpool.dev/retained", "true")
    pruned = {a.target for a in steps.actions if isinstance(a, Prune)}
    assert pruned == {ref(m) for m in WANTED} - {SECRET_REF}
    assert all(
        a.foreground == (a.target.kind in ("DaemonSet", "StatefulSet")) for a in steps.actions if isinstance(a, Prune)
    )
    assert steps.waiting
    assert not steps.done


def test_what_is_going_is_not_deleted_again():
    going = live(WANTED[-1])
    going["metadata"]["deletionTimestamp"] = "2026-11-20T10:00:01Z"
    steps = cleanup("Retain", observed(going))
    assert (steps.actions, bool(steps.waiting), steps.done) == ((), True, False)


def test_retain_ends_when_only_the_secret_is_left():
    secret = live(next(m for m in WANTED if m["kind"] == "Secret"))
    secret["metadata"]["labels"]["kvpool.dev/retained"] = "true"
    steps = cleanup("Retain", observed(secret))
    assert steps.actions == (PatchMetadata({"finalizers": []}),)
    assert steps.done


def test_retain_gives_up_at_the_deadline_and_says_so():
    stuck = live(WANTED[-1])
    stuck["metadata"]["deletionTimestamp"] = "2026-11-20T10:00:01Z"
    steps = cleanup("Retain", observed(stuck), overdue=True)
    assert kinds(steps) == ["EmitEvent", "PatchMetadata"]
    assert "chat-sidecar" in steps.actions[0].message  # type: ignore[union-attr]
    assert steps.done


def test_delete_stops_the_servers_first():
    steps = cleanup("Delete", observed(*map(live, WANTED)))
    assert steps.actions == (Prune(SIDECARS, "uid-chat-sidecar", foreground=True),)
    assert steps.waiting == "the sidecars to stop"


def test_then_it_wipes():
    rest = [live(m) for m in WANTED if ref(m) != SIDECARS]
    steps = cleanup("Delete", observed(*rest))
    assert {ref(a.manifest) for a in steps.actions if isinstance(a, Apply)} == {ref(m) for m in WIPE}


@pytest.mark.parametrize(
    ("status", "waits"),
    [
        ({}, True),
        ({"observedGeneration": 0, "desiredNumberScheduled": 2, "numberReady": 2}, True),
        ({"desiredNumberScheduled": 3, "numberReady": 2}, True),
        ({"desiredNumberScheduled": 3, "numberReady": 3}, False),
        ({"desiredNumberScheduled": 0}, False),
    ],
)
def test_every_node_must_have_been_wiped(status: dict[str, int], waits: bool):
    there = [live(m, **(status if ref(m) == WIPER else {})) for m in WIPE]
    steps = cleanup("Delete", observed(*there))
    assert steps.actions == (() if waits else (PatchMetadata({"annotations": {ANNOTATION_WIPED: "true"}}),))
    assert ("of 3 nodes" in steps.waiting) == (status.get("desiredNumberScheduled") == 3 and waits)


def test_after_the_wipe_everything_goes_with_the_secret():
    seen = observed(*map(live, WIPE), live(next(m for m in WANTED if m["kind"] == "Secret")))
    seen.raw["metadata"]["annotations"] = {ANNOTATION_WIPED: "true"}
    steps = cleanup("Delete", seen)
    assert {a.target for a in steps.actions if isinstance(a, Prune)} == set(seen.objects)
    empty = replace(seen, objects={})
    assert cleanup("Delete", empty).actions == (PatchMetadata({"finalizers": []}),)


def test_at_the_deadline_a_wipe_is_given_up_and_the_nodes_are_named():
    there = [live(m, **({"desiredNumberScheduled": 3, "numberReady": 1} if ref(m) == WIPER else {})) for m in WIPE]
    steps = cleanup("Delete", observed(*there), overdue=True)
    assert isinstance(steps.actions[0], EmitEvent)
    assert "1 of 3 nodes wiped" in steps.actions[0].message
    assert {a.target for a in steps.actions if isinstance(a, Prune)} == {ref(m) for m in WIPE}
    assert steps.actions[-1] == PatchMetadata({"finalizers": []})
    assert steps.done


@pytest.mark.parametrize(("wipe", "terminating"), [(None, False), (WIPE, True)])
def test_what_cannot_be_wiped_is_said_and_does_not_hold_the_deletion(wipe: Any, terminating: bool):
    seen = observed(*map(live, WANTED), namespace_terminating=terminating)
    steps = cleanup("Delete", seen, wipe=wipe)
    assert kinds(steps) == ["EmitEvent", "PatchMetadata"]
    assert steps.actions[1] == PatchMetadata({"annotations": {ANNOTATION_WIPED: "true"}})


def test_a_namespace_on_its_way_out_keeps_nothing():
    seen = observed(*map(live, WANTED), namespace_terminating=True)
    pruned = {a.target for a in cleanup("Retain", seen).actions if isinstance(a, Prune)}
    assert SECRET_REF in pruned
