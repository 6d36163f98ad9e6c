"""What the diagnosing commands say about documents of a cluster: planted causes, steps of a pod, formats."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from cli_documents import documents
from op_diagnosis_world import World, engine_pod
from op_planted_causes import PLANTED, data_types, refused_plug_in, short_ttl, unreachable_peer

from kvpool_cli import main as entry
from kvpool_cli.cluster.redact import redact
from kvpool_cli.cluster.view import choose, pool_state
from kvpool_cli.errors import NotFoundError

if TYPE_CHECKING:
    from pathlib import Path

POOL = "kvpool-system/chat"


@pytest.fixture
def ask(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run a command over a world; return its exit code and what it printed."""

    def run(world: World, *argv: str) -> tuple[int, str]:
        path = tmp_path / "documents.json"
        path.write_text(json.dumps(documents(world).dump()))
        status = entry.main([*argv, "--from", str(path)])
        return status, capsys.readouterr().out

    return run


def test_a_healthy_pool_has_no_findings_and_ends_with_0(ask: Any):
    state = pool_state(documents(), POOL)
    assert [f.dump() for f in state.findings] == []
    assert state.status["phase"] == "Ready"
    status, text = ask(World(), "doctor")
    assert (status, "no findings" in text) == (0, True)


@pytest.mark.parametrize("name", PLANTED)
def test_each_planted_cause_is_named_by_doctor_as_by_the_operator(ask: Any, name: str):
    plant, code, subject, fix = PLANTED[name]
    world = World()
    plant(world)
    status, text = ask(world, "doctor", "chat", "-o", "json")
    (pool,) = json.loads(text)["pools"]
    found = {(f["code"], f["subject"]): f for f in pool["findings"]}
    assert (code, subject) in found, list(found)
    assert fix in found[code, subject]["fix"]
    assert status == 1
    operators = {(f.code.value, f.subject) for f in world.findings()}
    assert set(found) == operators


@pytest.mark.parametrize("name", PLANTED)
def test_a_redacted_report_has_the_same_findings_and_no_environment(name: str):
    plant, *_ = PLANTED[name]
    world = World()
    plant(world)
    plain, kept = documents(world), redact(documents(world))
    assert [f.key for f in pool_state(kept, POOL).findings] == [f.key for f in pool_state(plain, POOL).findings]
    assert "hunter2" in json.dumps(plain.dump())
    assert "hunter2" not in json.dumps(kept.dump())


def test_the_text_has_cause_effect_fix_and_anchor(ask: Any):
    world = World()
    unreachable_peer(world)
    status, text = ask(world, "doctor", "kvpool-system/chat")
    assert status == 1
    for words in ("Error [KVP0402]", "cause:", "effect:", "fix:", "docs/reference/findings.md#kvp0402", "1 error"):
        assert words in text


def test_doctor_of_a_pod_stops_at_the_step_that_fails(ask: Any):
    world = World()
    refused_plug_in(world)
    status, text = ask(world, "doctor", "pod/team-a/y")
    lines = text.splitlines()
    assert status == 1
    assert any(line.startswith(" FAIL") and "JobResult is missing" in line for line in lines)
    assert " skip  shares blocks, hits: not reached" in lines
    assert "Error [KVP0301] (Pod team-a/y)" in text
    status, text = ask(world, "doctor", "pod/team-a/x")
    assert "hits: 80000 of 100000 tokens were found" in text


def test_doctor_of_a_pod_that_was_skipped_has_the_sentence(ask: Any):
    pod = engine_pod("s", "node-0")
    del pod["metadata"]["annotations"]["kvpool.dev/injected"]
    pod["metadata"]["annotations"]["kvpool.dev/skip-reason"] = "connector-present: it has NixlConnector"
    status, text = ask(World(pods=[pod]), "doctor", "pod/team-a/s")
    assert status == 1
    assert "it has NixlConnector" in text
    assert "Error [KVP0103] (Pod team-a/s)" in text


def test_a_pod_without_the_label_and_a_pool_that_is_not_there_are_said(ask: Any, capsys: Any):
    status, _ = ask(World(), "doctor", "pod/team-a/none")
    assert status == 1
    with pytest.raises(NotFoundError, match="there are: kvpool-system/chat"):
        choose(documents(), "chatt")


def test_why_lists_the_reasons_of_misses_with_their_share(ask: Any):
    world = World()
    short_ttl(world)
    for window in world.statuses["node-0"]["cache"]["models"][0]["windows"]:
        window |= {"tokensFound": 40_000, "misses": {"expired": 45_000, "never-stored": 15_000}}
    status, text = ask(world, "why", "team-a/x")
    assert status == 1
    row = next(line for line in text.splitlines() if line.startswith("expired "))
    assert row.split()[:4] == ["expired", "45k", "75", "%"]
    assert row.endswith("the block had reached its maximum age")
    assert "[KVP0502]" in text


def test_status_is_one_screen(ask: Any):
    status, text = ask(World(), "status")
    assert status == 0
    assert len(text.splitlines()) < 24
    for words in ("Pool kvpool-system/chat   Ready, no findings", "2/2 serve", "80 % of 200k tokens (1h)", "llama"):
        assert words in text
    assert "2 of 2 injected pods connected" in text


def test_fingerprints_diff_names_the_fields_first(ask: Any):
    world = World()
    data_types(world)
    status, text = ask(world, "fingerprints", "diff", "team-a/x", "team-a/y")
    lines = text.splitlines()
    assert status == 1
    assert lines[1].startswith("kv_dtype")
    assert lines[1].endswith("<- differs")
    assert "To share: the same kv_dtype, sizes.tp_size." in text
    status, text = ask(World(), "fingerprints", "diff", "team-a/x", "team-a/y")
    assert (status, "share their blocks" in text) == (0, True)


def test_top_lists_nodes_models_and_tenants(ask: Any):
    world = World()
    world.statuses["node-1"]["used_bytes"] = 5 * 2**30
    world.statuses["node-1"]["tenants"] = {"ab12": {"used_bytes": 7, "blocks": 1, "over_quota": 3}}
    _, text = ask(world, "top", "nodes", "-o", "json")
    assert [row["node"] for row in json.loads(text)["nodes"]] == ["node-1", "node-0"]
    _, text = ask(world, "top", "models")
    assert "llama" in text
    _, text = ask(world, "top", "tenants", "-o", "json")
    assert json.loads(text)["tenants"][0]["evictedOverQuota"] == 3


def test_peers_lists_failures_first_and_ends_with_1(ask: Any):
    world = World()
    fine = {"node": "node-0", "state": "reachable", "reason": ""}
    world.statuses["node-1"]["reachability"]["rows"] = [fine]
    unreachable_peer(world)
    status, text = ask(world, "peers", "-o", "json")
    pairs = json.loads(text)["pairs"]
    assert status == 1
    assert [(p["node"], p["peer"], p["reason"]) for p in pairs] == [
        ("node-0", "node-1", "timeout"),
        ("node-1", "node-0", ""),
    ]


def test_an_invalid_spec_is_one_finding(ask: Any):
    world = World(spec={"tiers": []})
    status, text = ask(world, "doctor")
    assert status == 1
    assert "[KVP0901]" in text


def test_an_operator_without_a_replica_is_a_finding():
    found = documents()
    found.objects["release"][0]["status"] = {}
    assert [f.code.value for f in pool_state(found, POOL).findings] == ["KVP0904"]


def test_documents_that_could_not_be_read_are_notes_and_not_findings(ask: Any):
    found = documents()
    for name in ("cluster_nodes", "namespaces", "workloads", "webhooks"):
        found.objects[name] = []
    found.notes.append("mutatingwebhookconfigurations could not be read: Forbidden")
    assert pool_state(found, POOL).findings == ()


def test_report_writes_a_file_that_doctor_reads(tmp_path: Path, ask: Any, capsys: Any):
    import tarfile

    world = World()
    unreachable_peer(world)
    path = tmp_path / "report.tar.gz"
    status, text = ask(world, "report", "--file", str(path))
    assert (status, "documents.json" in text) == (0, True)
    with tarfile.open(path) as archive:
        archive.extractall(tmp_path, filter="data")
    assert "hunter2" not in (tmp_path / "kvpool-report" / "documents.json").read_text()
    assert entry.main(["doctor", "--from", str(tmp_path / "kvpool-report" / "documents.json")]) == 1
    assert "[KVP0402]" in capsys.readouterr().out
    assert ask(world, "report", "--file", str(path))[0] == 2


def test_fingerprints_diff_keeps_the_tokenizer_apart_from_what_must_be_equal(ask: Any):
    world = World()
    world.statuses["node-0"]["fingerprints"][0]["fields"]["prompt.tokenizer"] = "a"
    world.statuses["node-1"]["fingerprints"][0]["fields"]["prompt.tokenizer"] = "b"
    status, text = ask(world, "fingerprints", "diff", "team-a/x", "team-a/y")
    assert status == 0
    assert text.endswith("These engines share their blocks. They turn prompts into tokens differently: tokenizer.\n")
    world.set_fingerprint("node-1", kv_dtype="77ab0000", prompt__tokenizer="b")
    status, text = ask(world, "fingerprints", "diff", "team-a/x", "team-a/y")
    assert status == 1
    assert "To share: the same kv_dtype. They turn" in text
