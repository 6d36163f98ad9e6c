"""Preflight decisions: when a rollout is admitted, from the results of the nodes."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from op_pool_world import NS
from op_preflight_samples import BAD, NOW, looks, reported
from op_samples import pool

from kvpool_operator.api.conditions import first_verdict
from kvpool_operator.api.pool.status import NodesStatus, PoolStatus
from kvpool_operator.k8s.client import ObjectRef
from kvpool_operator.observe.snapshot import Snapshot
from kvpool_operator.pools.conditions import ConditionInput, ReconcileOutcome
from kvpool_operator.pools.conditions.preflight import PREFLIGHT_PASSED
from kvpool_operator.preflight.gate import GRACE_S, WAIT_S, PreflightResult
from kvpool_operator.preflight.results import Finding, NodePreflight, PreflightRun, parse

LOOK = ObjectRef("DaemonSet", NS, "chat-preflight")
SIDECARS = ObjectRef("DaemonSet", NS, "chat-sidecar")
CONFIG = ObjectRef("ConfigMap", NS, "chat-config")
SHOWN = ObjectRef("ConfigMap", NS, "chat-plan")


@pytest.mark.parametrize(
    ("policy", "passed", "state", "is_open"),
    [
        ("Warn", [True, True], "Done", True),
        ("Warn", [True, False], "Done", True),
        ("Warn", [False, False], "Held", False),
        ("Warn", [True, None], "Checking", False),
        ("Warn", [False, None], "Checking", False),
        ("Require", [True, True], "Done", True),
        ("Require", [True, False], "Held", False),
        ("Require", [True, None], "Checking", False),
        ("Skip", [None, None], "Skipped", True),
        ("Warn", [], "Done", True),
        ("Require", [], "Done", True),
    ],
)
def test_what_is_rolled_out(policy: str, passed: list[bool | None], state: str, is_open: bool):
    gate = PreflightResult.evaluate(policy, "s", looks(*passed), {}, NOW)
    assert (gate.state, gate.is_open) == (state, is_open)


@pytest.mark.parametrize(
    ("policy", "passed", "after", "state", "is_open"),
    [
        ("Warn", [True, None], GRACE_S + 1, "Done", True),
        ("Warn", [False, None], GRACE_S + 1, "Checking", False),
        ("Warn", [False, None], WAIT_S + 1, "Held", False),
        ("Warn", [None, None], WAIT_S + 1, "Done", True),
        ("Require", [True, None], WAIT_S + 1, "Held", False),
        ("Require", [None, None], WAIT_S + 1, "Held", False),
    ],
)
def test_nodes_that_do_not_answer_are_waited_for_so_long(
    policy: str, passed: list[bool | None], after: float, state: str, is_open: bool
):
    first = PreflightResult.evaluate(policy, "s", looks(*passed), {}, NOW)
    later = PreflightResult.evaluate(policy, "s", looks(*passed), reported(first), NOW + timedelta(seconds=after))
    assert (later.state, later.is_open) == (state, is_open)


def test_a_look_is_not_over_before_it_is_known_how_many_nodes_there_are():
    assert PreflightResult.evaluate("Warn", "s", looks(True, desired=None), {}, NOW).state == "Checking"


def test_a_verdict_is_remembered_until_something_else_is_asked():
    done = reported(PreflightResult.evaluate("Warn", "s", looks(True, False), {}, NOW))
    again = PreflightResult.evaluate("Warn", "s", PreflightRun(), done, NOW)
    assert (again.state, again.is_open, again.passed, again.failed) == ("Done", True, 1, 1)
    assert again.findings[0].message == "it is full"
    assert reported(again) == done
    assert PreflightResult.evaluate("Warn", "other", PreflightRun(), done, NOW).state == "Checking"
    assert (
        PreflightResult.evaluate("Require", "s", PreflightRun(), done, NOW).state == "Checking"
    )  # was good enough for Warn alone


def test_a_dry_run_ends_also_when_nothing_would_be_rolled_out():
    gate = PreflightResult.evaluate("Warn", "s", looks(False), {}, NOW, dry_run=True)
    assert (gate.state, gate.is_open) == ("Done", False)
    assert PreflightResult.evaluate("Warn", "s", PreflightRun(), reported(gate), NOW, dry_run=True).state == "Done"
    assert PreflightResult.evaluate("Warn", "s", PreflightRun(), reported(gate), NOW).state == "Checking"


def test_what_is_held_goes_on_when_it_is_mended_however_late():
    held = reported(PreflightResult.evaluate("Warn", "s", looks(False), {}, NOW))
    later = NOW + timedelta(days=2)
    assert PreflightResult.evaluate("Warn", "s", looks(False), held, later).state == "Held"
    assert PreflightResult.evaluate("Warn", "s", looks(True), held, later).state == "Done"


def test_where_nothing_may_be_done_what_is_known_is_told():
    held = reported(PreflightResult.evaluate("Warn", "s", looks(False), {}, NOW))
    assert (PreflightResult.from_status("Warn", held).state, PreflightResult.from_status("Warn", held).is_open) == (
        "Held",
        False,
    )
    assert PreflightResult.from_status("Warn", {}).state == "Unknown"
    assert PreflightResult.from_status("Skip", held).state == "Skipped"


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda x: (
            st.lists(x)
            | st.dictionaries(
                st.sampled_from(
                    ["preflight", "passed", "findings", "check", "level", "message", "spec", "state", "nodes"]
                ),
                x,
            )
        ),
    )
)
def test_odd_answers_and_statuses_are_no_answers(raw: Any):
    look = parse(raw, "node")
    assert look.passed in (None, True, False)
    status = raw if isinstance(raw, dict) else {}
    gate = PreflightResult.evaluate("Warn", "s", PreflightRun(1, (look,), "s"), status, NOW)
    PoolStatus(preflight=gate.to_status()).dump()


def test_long_answers_are_cut_and_the_worst_is_told_first():
    listed = [{"check": "C" * 999, "level": "Warn", "message": "m" * 9999}] * 5000
    noisy = parse({"preflight": {"passed": True, "findings": listed}}, "node-a")
    failing = parse(BAD, "node-b")
    gate = PreflightResult.evaluate("Warn", "s", PreflightRun(2, (noisy, failing), "s"), {}, NOW)
    status = gate.to_status()
    assert status is not None
    assert len(status.findings) == 8
    assert (status.findings[0].node, status.findings[0].tier) == ("node-b", "nvme")
    assert len(json.dumps(status.model_dump())) < 8192


def test_one_kind_of_failure_on_many_nodes_hides_no_other():
    many = [NodePreflight(f"n{i}", False, (Finding("Index", "Fail", "away", node=f"n{i}"),)) for i in range(50)]
    other = NodePreflight("z", False, (Finding("Directory", "Fail", "full", node="z"),))
    found = PreflightResult.evaluate("Warn", "s", PreflightRun(51, (*many, other), "s"), {}, NOW).findings
    assert {f.check for f in found} == {"Index", "Directory"}


def measured(node: str, tier: str, **values: float) -> NodePreflight:
    return parse({"preflight": {"passed": True, "findings": [{"level": "Ok", "tier": tier, "values": values}]}}, node)


def test_of_what_was_measured_the_worst_is_told_and_remembered():
    nodes = (
        measured("a", "nvme", write_mb_s=900.2, read_mb_s=3000.0),
        measured("b", "nvme", write_mb_s=800.0, read_mb_s=0.4),
        measured("a", "nfs", round_trip_ms=1.5),
        measured("b", "nfs", round_trip_ms=20.1),
    )
    gate = PreflightResult.evaluate("Warn", "s", PreflightRun(4, nodes, "s"), {}, NOW)
    status = reported(gate)
    assert [{k: v for k, v in m.items() if v} for m in status["measured"]] == [
        {"tier": "nfs", "roundTripMs": 21, "slowestNode": "b"},
        {"tier": "nvme", "writeMBps": 800, "readMBps": 1, "slowestNode": "b"},
    ]
    assert reported(PreflightResult.evaluate("Warn", "s", PreflightRun(), status, NOW)) == status


@pytest.mark.parametrize("value", [None, "9", True, -1, float("inf"), float("nan"), 2**60, [1]])
def test_odd_measures_are_none(value: Any):
    assert measured("a", "nvme", read_mb_s=value).measures == ()


@pytest.mark.parametrize(
    ("policy", "passed", "after", "status", "reason", "words"),
    [
        ("Skip", [], 0, "Unknown", "PreflightSkipped", "Skip"),
        ("Warn", [True, None], 0, "Unknown", "PreflightRunning", "1 of 2"),
        ("Warn", [True, True], 0, "True", "NodesPassed", "2 of 2"),
        ("Warn", [True, False], 0, "False", "NodesFailed", "1 of 2 nodes passed; node-1: Directory: it is full"),
        ("Warn", [False], 0, "False", "NodesFailed", "nothing is rolled out"),
        ("Warn", [True, None], 99, "Unknown", "NodesUnresponsive", "1 did not report"),
        ("Warn", [], 0, "Unknown", "NoMatchingNodes", "spec.nodes"),
    ],
)
def test_what_is_told(policy: str, passed: list[bool | None], after: int, status: str, reason: str, words: str):
    gate = PreflightResult.evaluate(policy, "s", looks(*passed), {}, NOW)
    gate = PreflightResult.evaluate(policy, "s", looks(*passed), reported(gate), NOW + timedelta(seconds=after))
    outcome = ReconcileOutcome(preflight=gate)
    verdict = first_verdict(PREFLIGHT_PASSED, ConditionInput(pool(), Snapshot(raw={}), NodesStatus(), outcome))
    assert (verdict.status, verdict.reason) == (status, reason)
    assert words in verdict.message
