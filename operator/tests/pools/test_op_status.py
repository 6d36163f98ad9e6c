"""What users are told: conditions, phases, numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from op_samples import pool, pool_manifest
from op_status_samples import GOOD, LATER, NOW, message, observed, reported, status

from kvpool_operator.api.conditions import Condition, find, set_condition
from kvpool_operator.api.crdgen import crd
from kvpool_operator.observe.engine_pods import EnginePods
from kvpool_operator.observe.snapshot import Sidecar, Snapshot, Webhook
from kvpool_operator.pools.conditions import ReconcileOutcome
from kvpool_operator.pools.status import invalid_status, stable_part
from kvpool_operator.pools.status_reporter import phase_event
from kvpool_operator.sidecars.status import Fingerprint

STATUS_SCHEMA = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]


def check(schema: dict[str, Any], value: Any, path: str = "status") -> None:
    """Only what the schema of the CRD knows may be written: the API server drops the rest without a word."""
    if "properties" in schema:
        assert set(value) <= set(schema["properties"]), path
        for key, child in value.items():
            check(schema["properties"][key], child, f"{path}.{key}")
    elif "items" in schema:
        assert len(value) <= schema["maxItems"], path
        for item in value:
            check(schema["items"], item, f"{path}[]")
    elif "enum" in schema:
        assert value in schema["enum"], path


def test_a_pool_that_serves():
    made = status(observed())
    check(STATUS_SCHEMA, made)
    assert {c["type"]: (c["status"], c["reason"]) for c in made["conditions"]} == {
        "Ready": ("True", "Serving"),
        "StorageReady": ("True", "AllNodesReady"),
        "IndexReady": ("True", "Connected"),
        "InjectionReady": ("True", "Injecting"),
        "TransportReady": ("True", "ProtocolMatched"),
        "PeersReachable": ("True", "PeersVerified"),
        "EnginesConnected": ("Unknown", "NoEnginesInjected"),
        "BlocksShareable": ("True", "FingerprintsMatch"),
        "PreflightPassed": ("Unknown", "PreflightSkipped"),
        "Progressing": ("False", "UpToDate"),
        "RollingUpdateSafe": ("True", "CachePreserved"),
    }
    assert made["phase"] == "Ready"
    assert (made["observedGeneration"], made["poolID"]) == (3, "id-1")
    assert all(c["observedGeneration"] == 3 for c in made["conditions"])
    assert made["nodes"]["summary"] == "2/2"
    assert made["capacity"] == {"total": "20Gi", "used": "2Gi", "usedPercent": 10, "blocks": 64}
    assert made["cache"]["hitRate"] == "0.75"
    assert made["cache"]["tokensAsked"] == 2 * 800
    assert made["cache"]["loadSuccessRate"] == "0.80"
    assert made["cache"]["hits"] == {"local": 10, "peer": 6}
    assert made["cache"]["loadFailures"] == {"absent": 4}
    assert made["fingerprints"] == [
        {"digest": "4be1", "engine": "vllm 0.33", "model": "llama", "size": "2Gi", "connected": 2, "pods": []}
        | {"lastSeen": "", "tested": True}
    ]
    assert made["transport"]["effective"] == "TCP"


def with_report(**kwargs: Any) -> Snapshot:
    sidecars = (Sidecar("node-0", True, "", GOOD), Sidecar("node-1", True, "", replace(GOOD, **kwargs)))
    return observed(sidecars=sidecars)


@pytest.mark.parametrize(
    ("asked", "used", "expected"),
    [
        ("RDMA", "TCP", ("False", "ProtocolMismatch")),
        ("RDMA", "RDMA", ("True", "ProtocolMatched")),
        ("Auto", "RDMA", ("True", "ProtocolMatched")),
        ("TCP", "RDMA", ("False", "ProtocolMismatch")),
    ],
)
def test_the_transport_that_is_used_is_compared_with_the_one_that_is_asked_for(
    asked: str, used: str, expected: tuple[str, str]
):
    seen = with_report(transport=used, transport_reason="" if used == "RDMA" else "no device")
    made = status(replace(seen, sidecars=seen.sidecars[1:]), transport={"protocol": asked})
    assert reported(made, "TransportReady") == expected
    assert ("no device" in message(made, "TransportReady")) == (used == "TCP")
    assert made["transport"]["effective"] == used
    assert made["transport"].get("reason", "") == ("no device" if used == "TCP" else "")


@pytest.mark.parametrize(
    ("seen", "kind", "expected", "words"),
    [
        (Snapshot(raw=pool_manifest()), "StorageReady", ("False", "NotCreated"), "being created"),
        (observed(nodes=0, ready=0), "StorageReady", ("False", "NoMatchingNodes"), "spec.nodes"),
        (observed(ready=1), "StorageReady", ("False", "NodesNotReady"), "1 of 2 nodes serve; node-1: not ready yet"),
        (
            observed(ready=0, sidecars=(), rejection='violates PodSecurity "restricted"'),
            "StorageReady",
            ("False", "PodCreationFailed"),
            "enforce=privileged",
        ),
        (with_report(failing_drives=("nvme",)), "StorageReady", ("False", "DriveErrors"), "node-1: nvme"),
        (with_report(shared_problem="hung"), "StorageReady", ("False", "SharedTierUnavailable"), "node-1: hung"),
        (with_report(index_connected=False), "IndexReady", ("False", "NodesNotConnected"), "1 of 2 nodes"),
        (observed(sidecars=()), "IndexReady", ("Unknown", "StatusUnavailable"), "no sidecar"),
        (observed(external_problem="Secret x is missing"), "IndexReady", ("False", "InvalidIndexConfig"), "Secret x"),
        (
            with_report(transport="TCP", transport_reason="no device"),
            "TransportReady",
            ("True", "ProtocolMatched"),
            "no device",
        ),
        (observed(sidecars=()), "TransportReady", ("Unknown", "StatusUnavailable"), "no sidecar"),
        (
            observed(webhook=Webhook("no replica is ready")),
            "InjectionReady",
            ("False", "WebhookUnavailable"),
            "no replica",
        ),
        (
            observed(engines=EnginePods(not_injected=5, not_injected_names=("a/x", "a/y", "a/z"))),
            "InjectionReady",
            ("False", "PodsNotInjected"),
            "a/x; a/y; a/z; and 2 more",
        ),
        (observed(updated=1), "Progressing", ("True", "RollingOut"), "1 of 2"),
    ],
)
def test_each_trouble_has_its_reason(seen: Snapshot, kind: str, expected: tuple[str, str], words: str):
    made = status(seen)
    check(STATUS_SCHEMA, made)
    assert reported(made, kind) == expected
    assert words in message(made, kind)


def test_a_node_says_why_it_is_not_ready():
    sidecars = (Sidecar("node-0", True, "", GOOD), Sidecar("node-1", False, "container server failed: no space"))
    made = status(observed(ready=1, sidecars=sidecars))
    assert "node-1: container server failed: no space" in message(made, "Ready")


def test_what_the_api_server_refuses_comes_first():
    made = status(observed(), ReconcileOutcome(rejections=("ConfigMap x exists and is not this pool's",)))
    assert reported(made, "Ready") == ("False", "Rejected")
    assert "exists and is not" in message(made, "Ready")
    assert made["phase"] == "Failed"


def test_injection_that_is_off_is_not_trouble_of_the_storage():
    made = status(observed(), injection={"enabled": False})
    assert reported(made, "InjectionReady") == ("False", "Disabled")
    assert reported(made, "Ready") == ("True", "Serving")


@pytest.mark.parametrize(
    ("previous", "seen", "progress", "spec", "phase"),
    [
        ("", Snapshot(raw=pool_manifest()), ReconcileOutcome(), {}, "Pending"),
        ("Pending", observed(ready=0), ReconcileOutcome(applied=3), {}, "Provisioning"),
        ("Ready", observed(ready=1), ReconcileOutcome(), {}, "Degraded"),
        ("Ready", observed(ready=1, updated=1), ReconcileOutcome(), {}, "Updating"),
        ("Ready", observed(updated=1), ReconcileOutcome(), {}, "Updating"),
        ("Degraded", observed(), ReconcileOutcome(), {}, "Ready"),
        ("Ready", observed(), ReconcileOutcome(), {"mode": "Paused"}, "Paused"),
    ],
)
def test_phases(previous: str, seen: Snapshot, progress: ReconcileOutcome, spec: dict[str, Any], phase: str):
    seen = replace(seen, raw=pool_manifest() | {"status": {"phase": previous}})
    assert status(seen, progress, **spec)["phase"] == phase


def test_transition_times_move_only_when_the_status_does():
    first = status(observed())
    raw = pool_manifest() | {"status": first}
    same = status(observed(raw=raw), now=LATER)
    assert same == first
    worse = status(observed(raw=raw, ready=1), now=LATER)
    times = {c["type"]: c["lastTransitionTime"] for c in worse["conditions"]}
    assert times["Ready"] == times["StorageReady"] == LATER
    assert times["IndexReady"] == times["TransportReady"] == NOW


conditions = st.lists(
    st.tuples(
        st.sampled_from(["Ready", "IndexReady"]),
        st.sampled_from(["True", "False", "Unknown"]),
        st.sampled_from(["A", "B"]),
    ),
    max_size=12,
)


@given(conditions)
def test_conditions_are_one_per_type_and_remember_their_last_flip(history: list[tuple[str, str, str]]):
    held: list[dict[str, Any]] = []
    flips: dict[str, tuple[str, str]] = {}
    for i, (kind, state, reason) in enumerate(history):
        held = set_condition(held, Condition(type=kind, status=state, reason=reason), f"t{i}")  # type: ignore[arg-type]
        if flips.get(kind, ("", ""))[0] != state:
            flips[kind] = (state, f"t{i}")
        assert len({c["type"] for c in held}) == len(held)
        assert {c["type"]: (c["status"], c["lastTransitionTime"]) for c in held} == flips
        assert find(held, kind) is not None


def test_garbage_in_the_old_status_does_no_harm():
    odd = ["x", {"type": 1}, None, {"type": "Retired"}, {"type": "Ready", "status": "True", "lastTransitionTime": 7}]
    raw = pool_manifest() | {"status": {"conditions": odd, "phase": 7, "nodes": []}}
    check(STATUS_SCHEMA, status(observed(raw=raw)))
    assert reported(status(observed(raw=raw)), "Ready") == ("True", "Serving")
    assert reported(status(observed(raw=pool_manifest() | {"status": "text"})), "Ready") == ("True", "Serving")


def test_a_spec_that_cannot_be_understood_leaves_the_rest_of_the_status():
    raw = pool_manifest() | {"status": status(observed())}
    made = invalid_status(pool().metadata, replace(observed(), raw=raw), "spec.tiers: wrong", LATER)
    check(STATUS_SCHEMA, made)
    assert reported(made, "Ready") == ("False", "InvalidSpec")
    assert "spec.tiers: wrong" in message(made, "Ready")
    assert made["nodes"]["summary"] == "2/2"
    assert made["phase"] == "Failed"


def test_numbers_wait_and_news_do_not():
    first = status(observed())
    grown = status(observed(raw=pool_manifest() | {"status": first}))
    grown["cache"] = {**grown["cache"], "hitRate": "0.81"}
    worse = status(observed(ready=1, raw=pool_manifest() | {"status": first}))
    empty = {**first, "capacity": {**first["capacity"], "blocks": 0}}
    assert stable_part(first) == stable_part(grown)
    assert stable_part(first) != stable_part(worse)
    assert stable_part(first) != stable_part(empty), "the first blocks show at once"


@pytest.mark.parametrize(
    ("previous", "phase", "message", "warning"),
    [
        ("", "Pending", "phase is Pending: the sidecars are being created", False),
        ("Provisioning", "Ready", "phase changed from Provisioning to Ready: 2 nodes serve", False),
        ("Ready", "Degraded", "phase changed from Ready to Degraded: 1 of 2 nodes serve", True),
    ],
)
def test_a_changed_phase_is_an_event(previous: str, phase: str, message: str, warning: bool):
    seen = {"Pending": Snapshot(raw=pool_manifest()), "Ready": observed(), "Degraded": observed(ready=1)}[phase]
    made = status(replace(seen, raw=pool_manifest() | {"status": {"phase": previous}}))
    event = phase_event(previous, made)
    assert event is not None
    assert (event.reason, event.warning) == ("PhaseChanged", warning)
    assert event.message.startswith(message)
    assert phase_event(phase, made) is None


def test_messages_are_bounded():
    made = status(observed(), ReconcileOutcome(rejections=("x" * 5000,)))
    assert all(len(c["message"]) <= 1024 for c in made["conditions"])


def test_no_more_than_ten_fingerprints_the_largest_first():
    kinds = tuple(Fingerprint(f"d{i:02}", "e", "m", i) for i in range(10))
    more = tuple(Fingerprint(f"e{i:02}", "e", "m", 100 + i) for i in range(10))
    seen = observed(
        sidecars=(
            Sidecar("a", True, "", replace(GOOD, fingerprints=kinds)),
            Sidecar("b", True, "", replace(GOOD, fingerprints=more)),
        )
    )
    found = [f["digest"] for f in status(seen)["fingerprints"]]
    assert found == [f"e{i:02}" for i in reversed(range(10))]
