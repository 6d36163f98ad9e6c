"""Findings in the status: the table of codes, bounds, order, what counts as a change, and codes in conditions."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from op_samples import pool_manifest
from op_status_samples import GOOD, observed, status

from kvpool_operator.api.conditions import MESSAGE_LENGTH, Verdict, find
from kvpool_operator.api.crdgen import crd
from kvpool_operator.api.findings.codes import Code
from kvpool_operator.api.findings.row import Severity
from kvpool_operator.api.pool.status import MAX_FINDINGS, PoolStatus
from kvpool_operator.api.reasons import REASONS, EventReason, Reason
from kvpool_operator.api.v1alpha1 import Metadata
from kvpool_operator.diagnosis.finding import make, ranked
from kvpool_operator.observe.engine_pods import EnginePod, EnginePods
from kvpool_operator.observe.snapshot import Sidecar
from kvpool_operator.pools.injection_watchdog import pod_event
from kvpool_operator.pools.status import invalid_status, stable_part, with_code
from kvpool_operator.sidecars.cache import CacheReport, LookupTokens

if TYPE_CHECKING:
    from typing import Any


def failing(**more: Any) -> Any:
    bad = replace(GOOD, failing_drives=("nvme",), **more)
    return observed(sidecars=(Sidecar("node-0", True, "", GOOD), Sidecar("node-1", True, "", bad)))


@pytest.mark.parametrize("code", Code)
def test_each_code_has_words_for_people(code: Code):
    assert code.value[:3] == "KVP"
    assert len(code.value) == 7
    for text in (code.cause, code.effect, code.fix):
        assert text.endswith(".")
    assert len(code.fix) <= 300


def test_each_reason_for_trouble_of_a_pool_has_a_code():
    explained = {reason for code in Code for reason in code.reasons}
    waits = {"NotCreated", "DryRun", "PreflightRunning", "PreflightSkipped", "PeersNotVerified", "EnginesStarting"}
    waits |= {"NoEnginesInjected", "NoEnginesConnected", "Applying", "RollingOut", "Paused", "Deleting"}
    waits |= {"FormatUnknown", "IndexNotSynced", "EphemeralVolumes"}
    troubles = {reason for reasons in REASONS["KVCachePool"].values() for reason in reasons[1:]}
    assert {str(r) for r in troubles - explained} == waits


def test_a_pool_without_findings_has_no_such_field():
    healthy = replace(GOOD, cache=CacheReport({"1h": LookupTokens(800, 600, {"never-stored": 200})}))
    seen = observed(sidecars=tuple(Sidecar(f"node-{n}", True, "", healthy) for n in range(2)))
    assert "findings" not in status(seen)


def test_findings_are_in_the_status_sorted_and_bounded():
    pods = [EnginePod("t", f"p{n}", f"u{n}", "skipped", skip="user-reserved: user 65532") for n in range(40)]
    seen = replace(failing(), engines=EnginePods(skipped=40, pods=tuple(pods)))
    found = status(seen)["findings"]
    assert len(found) == MAX_FINDINGS
    assert [f["severity"] for f in found] == ["Error"] * MAX_FINDINGS
    assert [f["code"] for f in found] == sorted(f["code"] for f in found)
    assert PoolStatus.model_validate({"findings": found}).findings


def test_the_api_server_accepts_what_is_written():
    schema = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"]["findings"]
    assert schema["type"] == "array"
    assert schema["x-kubernetes-list-type"] == "atomic"
    assert schema["maxItems"] == MAX_FINDINGS
    fields = schema["items"]["properties"]
    for finding in status(failing())["findings"]:
        assert set(finding) == set(fields)
        assert finding["severity"] in fields["severity"]["enum"]
        assert all(len(finding[name]) <= fields[name]["maxLength"] for name in ("subject", "summary", "fix"))


def test_a_sidecar_that_answers_every_other_time_causes_no_write_each_time():
    def seen(*, answers: bool) -> Any:
        silent = Sidecar("node-1", True, "", GOOD if answers else None)
        return observed(sidecars=(Sidecar("node-0", True, "", GOOD), silent))

    one, other = (status(seen(answers=answers)) for answers in (True, False))
    assert "KVP0401" in [f["code"] for f in other["findings"]]
    assert "KVP0401" not in [f["code"] for f in one["findings"]]
    for made in (one, other):  # its messages count nodes, as before
        made["conditions"] = []
    assert stable_part(one) == stable_part(other)


def test_a_condition_ends_with_the_code_of_the_finding():
    condition = find(status(failing())["conditions"], "StorageReady") or {}
    assert condition["message"].endswith("[KVP0601]")


def test_a_long_message_keeps_its_code():
    finding = make(Code.DRIVE_ERRORS, "KVCachePool a/b", "x")
    verdict = with_code(Verdict.false(Reason.DRIVE_ERRORS, "y" * 5000), (finding,))
    assert len(verdict.message) <= MESSAGE_LENGTH
    assert verdict.message.endswith("[KVP0601]")
    assert with_code(Verdict.false(Reason.NOT_CREATED, "y"), (finding,)).message == "y"


def test_an_invalid_spec_is_the_only_finding_left():
    made = invalid_status(
        Metadata(name="chat", namespace="s"), observed(raw=pool_manifest()), "spec.tiers: too few", "n"
    )
    assert [f["code"] for f in made["findings"]] == ["KVP0901"]
    assert "spec.tiers: too few" in made["findings"][0]["summary"]


def test_the_event_of_a_pod_ends_with_the_code_of_its_finding():
    skipped = EnginePod("t", "p", "u", "skipped", skip="namespace-not-allowed: not allowed")
    silent = EnginePod("t", "p", "u", "injected")
    events = [
        pod_event(skipped, "s/chat"),
        pod_event(silent, "s/chat", "why"),
        pod_event(silent, "s/chat", "why", refused=True),
    ]
    assert [event.message[-9:-1] for event in events if event] == ["[KVP0106", "[KVP0302", "[KVP0301"]


def test_each_reason_for_trouble_of_a_pod_has_a_code():
    explained = {str(event) for code in Code for event in code.events}
    about_pools = {"PhaseChanged", "CleanupTimedOut", "WipeSkipped", "EvictedForInjection"}
    assert {str(event) for event in EventReason} - explained == about_pools


def test_one_finding_stands_for_a_code_and_a_subject_the_severest():
    twice = [make(Code.LOADS_SLOWER, "a", "1", severity=Severity.INFO), make(Code.LOADS_SLOWER, "a", "2")]
    assert [f.summary for f in ranked(twice)] == ["2"]
