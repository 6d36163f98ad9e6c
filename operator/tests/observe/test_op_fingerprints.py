"""Pods that should share and do not: found, named with the fields that differ, and shown within the bounds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from op_samples import pool, pool_manifest

from kvpool_operator.api.conditions import find
from kvpool_operator.observe.engine_pods import EnginePods, count
from kvpool_operator.observe.fingerprints import explain, find_gaps, group_fingerprints
from kvpool_operator.observe.snapshot import Sidecar, Snapshot
from kvpool_operator.pools.conditions import ReconcileOutcome
from kvpool_operator.pools.status import make_status
from kvpool_operator.sidecars.status import ConnectedPod, Fingerprint, SidecarStatus

NAMES = {"1": "team-a/one", "2": "team-a/two", "3": "team-a/three", "4": "team-b/four"}
FACTS = {"engine": "aaaaaaaa", "kv_dtype": "bbbbbbbb", "sizes.tp_size": "cccccccc", "block_bytes": "dddddddd"}
OTHER = {"kv_dtype": "00000000"}


def kind(digest: str, *uids: str, model: str = "llama", gone: tuple[str, ...] = (), **fields: str) -> Fingerprint:
    pods = [*(ConnectedPod(u, True, 100) for u in uids), *(ConnectedPod(u, False, 50) for u in gone)]
    reported = {**FACTS, **{k.replace("__", "."): v for k, v in fields.items()}}
    return Fingerprint(digest, "vllm 0.33", model, 5, reported, len(uids), tuple(pods))


def judged(*of_nodes: list[Fingerprint], engines: EnginePods | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """The condition, and the whole status."""
    sidecars = tuple(
        Sidecar(f"n{i}", True, "", SidecarStatus(ready=True, fingerprints=tuple(f))) for i, f in enumerate(of_nodes)
    )
    seen = Snapshot(raw=pool_manifest(), sidecars=sidecars, engines=engines or EnginePods(names=NAMES))
    made = make_status(pool(), seen, ReconcileOutcome(), "id", "2026-11-21T10:00:00Z")
    condition = find(made["conditions"], "BlocksShareable")
    assert condition is not None
    return condition, made


@pytest.mark.parametrize("field", sorted(FACTS))
def test_two_pods_that_differ_in_any_field_are_told_apart_by_its_name(field: str):
    condition, made = judged([kind("d1", "1")], [kind("d2", "2", **{field.replace(".", "__"): "00000000"})])
    assert (condition["status"], condition["reason"]) == ("False", "FingerprintsDiffer")
    assert (
        condition["message"] == f"team-a/one cannot share blocks of llama with team-a/two ({field} differs) [KVP0202]"
    )
    assert [(f["digest"], f["pods"], f["connected"]) for f in made["fingerprints"]] == [
        ("d1", ["team-a/one"], 1),
        ("d2", ["team-a/two"], 1),
    ]


@pytest.mark.parametrize("by_node", [(True, True), (False, True), (False, False)])
def test_an_engine_of_an_untested_version_is_shown_as_such(by_node: tuple[bool, ...]):
    _, made = judged(*([replace(kind("d1", str(n)), is_tested=tested)] for n, tested in enumerate(by_node)))
    (shown,) = made["fingerprints"]
    assert shown["tested"] is all(by_node)


@pytest.mark.parametrize(("reported", "tested"), [({}, True), ({"tested": True}, True), ({"tested": False}, False)])
def test_a_sidecar_that_does_not_report_tests_counts_as_tested(reported: dict[str, Any], tested: bool):
    (found,) = SidecarStatus.parse({"fingerprints": [{"digest": "d1", **reported}]}).fingerprints
    assert found.is_tested is tested


def test_what_follows_from_something_else_is_named_last():
    condition, _ = judged([kind("d1", "1"), kind("d2", "2", block_bytes="0", sizes__tp_size="0", engine="0")])
    assert "(engine, sizes.tp_size, block_bytes differ)" in condition["message"]


@pytest.mark.parametrize("field", ["private", "reset", "process"])
def test_an_engine_that_shares_with_nobody_is_told_by_that_first(field: str):
    condition, _ = judged([kind("d1", "1"), kind("d2", "2", **OTHER, **{field: "0"})])
    assert f"({field}, kv_dtype differ)" in condition["message"]


def test_pods_of_one_fingerprint_share_wherever_they_run():
    condition, made = judged([kind("d1", "1")], [kind("d1", "2", "3")])
    assert (condition["status"], condition["reason"]) == ("True", "FingerprintsMatch")
    assert made["fingerprints"][0]["pods"] == ["team-a/one", "team-a/three", "team-a/two"]
    assert made["fingerprints"][0]["connected"] == 3


@pytest.mark.parametrize(
    ("fingerprints", "why"),
    [
        ([kind("d1", "1"), kind("d2", "4", **OTHER)], "another namespace is another tenant"),
        ([kind("d1", "1"), kind("d2", "2", model="qwen", **OTHER)], "another model"),
        ([kind("d1", "1"), kind("d2", gone=("2",), **OTHER)], "a pod that was there before"),
        ([kind("d1", "1"), kind("d2", "1", **OTHER)], "one pod with two kinds, such as ranks"),
        ([kind("d1", "1"), kind("d2", "1", "2", **OTHER), kind("d3", "2")], "pods that share one of several kinds"),
        ([kind("d1", "1"), kind("d2", "9", **OTHER)], "a pod that is not there any more"),
        ([kind("d1", "1", model=""), kind("d2", "2", model="", **OTHER)], "an engine that does not name its model"),
    ],
)
def test_what_is_no_disagreement(fingerprints: list[Fingerprint], why: str):
    condition, _ = judged(fingerprints)
    assert (condition["status"], condition["reason"]) == ("True", "FingerprintsMatch"), why


def test_the_larger_group_is_told_first_and_names_are_few():
    names = {str(i): f"t/p{i}" for i in range(9)}
    found = [kind("d1", "0", **OTHER), kind("d2", *map(str, range(1, 8)))]
    condition, _ = judged(found, engines=EnginePods(names=names))
    assert condition["message"] == (
        "t/p1, t/p2, t/p3 and 4 more cannot share blocks of llama with t/p0 (kv_dtype differs) [KVP0202]"
    )


def test_an_older_client_that_tells_no_fields_is_said_so():
    silent = Fingerprint("d2", "vllm 0.32", "llama", 5, {}, 1, (ConnectedPod("2", True, 1),))
    condition, _ = judged([kind("d1", "1"), silent])
    assert "(their clients do not report what differs)" in condition["message"]


def test_nobody_there_is_unknown():
    assert judged([])[0]["reason"] == "NoEnginesConnected"
    assert judged()[0]["reason"] == "StatusUnavailable"
    condition, made = judged([kind("d1", gone=("1",))])
    assert (condition["status"], condition["reason"]) == ("Unknown", "NoEnginesConnected")
    (shown,) = made["fingerprints"]
    assert (shown["connected"], shown["pods"], shown["lastSeen"]) == (0, ["team-a/one"], "1970-01-01T00:00:50Z")


def test_an_engine_without_a_remote_tier_is_said_as_long_as_its_pods_are_there():
    def pod(name: str, family: str, **metadata: Any) -> dict[str, Any]:
        notes = {"kvpool.dev/pool": "s/chat", "kvpool.dev/injected": "x", "kvpool.dev/injected-engine": family}
        return {"metadata": {"namespace": "t", "name": name, "uid": name, "annotations": notes, **metadata}}

    pods = [pod("kvbm", "dynamo"), pod("plain", "vllm"), pod("old", "dynamo", deletionTimestamp="now")]
    engines = count(pods, "s", "chat", "i", {})
    assert (engines.alone, engines.names) == (1, {"kvbm": "t/kvbm", "plain": "t/plain"})
    condition, _ = judged([kind("d1", "plain")], engines=engines)
    assert (condition["status"], condition["reason"]) == ("False", "EngineHasNoRemoteTier")
    assert condition["message"].startswith("t/kvbm run an engine without a remote tier")
    assert (
        judged([kind("d1", "plain")], engines=count(pods[1:], "s", "chat", "i", {}))[0]["reason"] == "FingerprintsMatch"
    )


def test_whether_engines_share_says_nothing_about_the_pools_health():
    _, well = judged([kind("d1", "1")])
    _, apart = judged([kind("d1", "1"), kind("d2", "2", **OTHER)])
    assert find(well["conditions"], "Ready") == find(apart["conditions"], "Ready")


def test_no_time_that_a_sidecar_tells_can_hurt():
    odd = Fingerprint("d", "e", "m", 1, {}, 0, (ConnectedPod("1", False, 2**53 - 1),))
    assert judged([odd])[1]["fingerprints"][0]["lastSeen"] == ""


uids = st.sampled_from([*NAMES, "9"])
fingerprints = st.builds(
    Fingerprint,
    digest=st.sampled_from(["a" * 64, "b" * 64, "c" * 64, "d" * 64]),
    engine=st.text(max_size=200),
    model=st.sampled_from(["llama", "m" * 200]),
    bytes=st.integers(0, 2**53),
    fields=st.dictionaries(st.text(max_size=48), st.text(max_size=8), max_size=48),
    connected=st.integers(0, 2**53),
    pods=st.lists(st.builds(ConnectedPod, uids, st.booleans(), st.integers(0, 2**53)), max_size=16).map(tuple),
)


@given(st.lists(st.lists(fingerprints, max_size=5), max_size=3))
def test_groups_never_share_a_pod_and_every_connected_pod_is_in_one(reported: list[list[Fingerprint]]):
    found = group_fingerprints([SidecarStatus(fingerprints=tuple(f)) for f in reported], NAMES)
    by_digest = {k.digest: k for k in found}
    for split in find_gaps(found):
        inside = [
            {p for d in g for p in by_digest[d].connected if p.startswith(f"{split.namespace}/")} for g in split.groups
        ]
        assert all(inside)
        assert sum(map(len, inside)) == len(set().union(*inside))
        assert split.model in explain(split, by_digest) or len(split.model) > 80
    condition, _ = judged(*reported)
    assert len(condition["message"]) <= 1024
