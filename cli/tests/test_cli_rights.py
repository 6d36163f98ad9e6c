"""Commands of a user without a right: nothing that was not read is taken as absent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from cli_documents import SYSTEM, documents
from op_diagnosis_world import World, engine_pod

from kvpool_cli import main as entry
from kvpool_cli.cluster.documents import QUERIES, read
from kvpool_cli.cluster.redact import redact
from kvpool_cli.cluster.view import pool_state
from kvpool_cli.errors import ForbiddenError, UnreachableError
from kvpool_cli.kubectl import Kubectl

if TYPE_CHECKING:
    from kvpool_cli.cluster.documents import Documents

POOL = "kvpool-system/chat"
PROXY = "get pods/proxy in namespace kvpool-system"
EXAMPLE = Path(__file__).parents[2] / "examples" / "diagnosis-rights.yaml"
WRITTEN = {
    "code": "KVP0602",
    "severity": "Error",
    "subject": "Node node-1",
    "summary": "not mounted",
    "fix": "mount it",
}


def without_proxy(world: World | None = None) -> Documents:
    """What a user reads who may list everything and has no right to pods/proxy."""
    found = documents(world)
    found.denied = dict.fromkeys(found.statuses, PROXY)
    found.notes = [f"/status of {key} could not be read: Forbidden" for key in found.statuses]
    found.statuses = {}
    return found


def run(found: Documents, tmp_path: Path, *argv: str) -> int:
    path = tmp_path / "documents.json"
    path.write_text(json.dumps(found.dump()))
    return entry.main([*argv, "--from", str(path)])


def test_a_sidecar_that_may_not_be_read_is_not_a_silent_node(tmp_path: Path, capsys: Any):
    status = run(without_proxy(), tmp_path, "doctor", "chat")
    text = capsys.readouterr().out
    assert "KVP0401" not in text
    assert f"Info [KVP0906] (KVCachePool {POOL}) you have no right to {PROXY}" in text
    assert "examples/diagnosis-rights.yaml" in text
    assert status == 0


def test_a_sidecar_that_does_not_answer_is_a_silent_node():
    found = documents(World(silent_nodes={"node-0"}))
    assert [(f.code.value, f.subject) for f in pool_state(found, POOL).findings] == [("KVP0401", "Node node-0")]


def test_without_the_right_the_findings_are_those_of_the_operator(tmp_path: Path, capsys: Any):
    found = without_proxy()
    later = WRITTEN | {"code": "KVP9999"}
    found.objects["pools"][0]["status"] |= {"findings": [WRITTEN, later], "phase": "Degraded"}
    found.objects["release"][0]["status"] = {}
    state = pool_state(found, POOL)
    assert [f.code.value for f in state.findings] == ["KVP0602", "KVP0904", "KVP0906"]
    assert (state.findings[0].fix, state.status["phase"]) == ("mount it", "Degraded")
    assert run(found, tmp_path, "status", "chat") == 1
    assert "Peers     not read" in capsys.readouterr().out


def test_a_pod_is_neither_connected_nor_silent_without_the_right(tmp_path: Path, capsys: Any):
    assert run(without_proxy(), tmp_path, "doctor", "pod/team-a/x") == 0
    lines = capsys.readouterr().out.splitlines()
    assert f" skip  connection: not read, you have no right to {PROXY}" in lines
    assert " skip  shares blocks, hits: not reached" in lines


def test_a_pod_that_was_skipped_is_found_without_the_right(tmp_path: Path, capsys: Any):
    pod = engine_pod("s", "node-0")
    del pod["metadata"]["annotations"]["kvpool.dev/injected"]
    pod["metadata"]["annotations"]["kvpool.dev/skip-reason"] = "connector-present: it has NixlConnector"
    assert run(without_proxy(World(pods=[pod])), tmp_path, "doctor", "pod/team-a/s") == 1
    assert "Error [KVP0103]" in capsys.readouterr().out


def test_pods_that_may_not_be_listed_are_not_absent():
    found = documents()
    found.objects["pool_pods"] = found.objects["owned"] = []
    found.denied = {"pool_pods": "list pods"}
    assert [f.code.value for f in pool_state(found, POOL).findings] == ["KVP0906"]


@pytest.mark.parametrize("command", [("peers",), ("top", "nodes")])
def test_commands_without_findings_warn_on_stderr(command: tuple[str, ...], tmp_path: Path, capsys: Any):
    assert run(without_proxy(), tmp_path, *command) == 0
    printed = capsys.readouterr()
    assert printed.err == f"warning: you have no right to {PROXY}\n"
    assert "no node has a peer" not in printed.out


def test_the_rights_stay_in_a_report():
    assert redact(without_proxy()).dump()["denied"] == without_proxy().denied


class ForbiddenProxy(Kubectl):
    """A cluster whose API server admits lists, and refuses or fails the proxy of pods."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def get(self, kind: str, *_: Any, **selectors: Any) -> dict[str, Any]:
        names = [q.name for q in QUERIES if (q.kinds, q.labels) == (kind, selectors["labels"])]
        found = documents().objects.get(names[0], [])
        running = [{**one, "status": {"phase": "Running"}} for one in found]
        return {"items": running if names[0] == "pool_pods" else found}

    def raw(self, _path: str) -> dict[str, Any]:
        raise self.error


def test_a_refused_proxy_is_a_missing_right_and_a_failed_one_is_not():
    refused = read(ForbiddenProxy(ForbiddenError("cannot get pods/proxy")))
    assert refused.denied == {f"{SYSTEM}/chat-sidecar-node-{n}": PROXY for n in (0, 1)}
    failed = read(ForbiddenProxy(UnreachableError("connection refused")))
    assert failed.denied == {}
    assert len(failed.notes) == 2


def test_the_example_grants_every_request_of_the_documents():
    granted = {
        (group, resource)
        for document in yaml.safe_load_all(EXAMPLE.read_text())
        for rule in document.get("rules", [])
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }
    for query in QUERIES:
        for kind in query.kinds.split(","):
            resource, _, group = kind.partition(".")
            assert (group, resource) in granted, kind
    assert ("", "pods/proxy") in granted
