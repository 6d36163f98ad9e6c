"""Reading a cluster and running operations through a kubectl that answers from files, also when it fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from cli_documents import documents

from kvpool_cli.cluster.documents import QUERIES, read
from kvpool_cli.cluster.operations import manifest
from kvpool_cli.cluster.view import pool_state
from kvpool_cli.errors import UnreachableError
from kvpool_cli.kubectl import Kubectl
from kvpool_operator.api.operation import KVCacheOperation

if TYPE_CHECKING:
    from pathlib import Path

PROGRAM = """#!{python}
import json, pathlib, sys
answers = json.loads(pathlib.Path({answers!r}).read_text())
words = sys.argv[1:]
for key, answer in answers.items():
    if all(word in words for word in key.split()):
        if "error" in answer:
            print(answer["error"], file=sys.stderr)
            sys.exit(1)
        print(json.dumps(answer["json"]))
        sys.exit(0)
print("Error from server (Forbidden): " + " ".join(words), file=sys.stderr)
sys.exit(1)
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Any:
    """A kubectl whose answers are those of the documents, but for those that a test replaces."""

    def make(**replaced: Any) -> Kubectl:
        found, answers = documents(), {}
        for query in QUERIES:
            words = f"get {query.kinds} --all-namespaces" + (f" --selector={query.labels}" if query.labels else "")
            answers[words] = replaced.get(query.name, {"json": {"items": found.of(query.name)}})
        for key, answer in found.statuses.items():
            namespace, _, pod = key.partition("/")
            path = f"get --raw=/api/v1/namespaces/{namespace}/pods/{pod}:7422/proxy/status"
            answers[path] = replaced.get(pod, {"json": answer["status"]})
        answers.update(replaced.get("more", {}))
        (tmp_path / "answers.json").write_text(json.dumps(answers))
        program = tmp_path / "kubectl"
        program.write_text(PROGRAM.format(python=sys.executable, answers=str(tmp_path / "answers.json")))
        program.chmod(0o755)
        return Kubectl((), str(program))

    return make


def test_a_cluster_is_read_whole(cluster: Any):
    found = read(cluster())
    assert found.notes == []
    assert set(found.statuses) == set(documents().statuses)
    assert pool_state(found, "kvpool-system/chat").status["nodes"]["summary"] == "2/2"


def test_what_may_not_be_read_is_a_note(cluster: Any):
    forbidden = {"error": "Error from server (Forbidden): nodes is forbidden"}
    found = read(cluster(cluster_nodes=forbidden, workloads=forbidden))
    assert len(found.notes) == 2
    assert all("forbidden" in note for note in found.notes)


def test_a_sidecar_that_does_not_answer_is_a_note_and_a_finding(cluster: Any):
    found = read(cluster(**{"chat-sidecar-node-1": {"error": "error trying to reach service: timeout"}}))
    assert [note for note in found.notes if "chat-sidecar-node-1" in note]
    codes = [f.code.value for f in pool_state(found, "kvpool-system/chat").findings if f.subject == "Node node-1"]
    assert codes == ["KVP0401"]


def test_a_cluster_without_the_pools_cannot_be_diagnosed(cluster: Any):
    missing = {"error": 'Error from server (NotFound): the server doesn\'t have a resource type "kvcachepools"'}
    with pytest.raises(UnreachableError, match="kvcachepools"):
        read(cluster(pools=missing))


@pytest.mark.parametrize(
    ("kind", "action"),
    [
        ("purge", {"tenant": "team-a", "olderThan": "72h"}),
        ("purge", {"all": True}),
        ("warm", {"bandwidth": "100Mi"}),
        ("verify", {"bandwidth": "100Mi"}),
        ("drain", {"node": "node-1", "bandwidth": "256Mi"}),
        ("preflight", {"measure": True}),
    ],
)
def test_the_api_accepts_what_the_commands_create(kind: str, action: dict[str, Any]):
    made = manifest(kind, action, "kvpool-system", "chat", "1h")
    made["metadata"]["name"] = "x"
    assert KVCacheOperation.parse(made).spec.kind == kind


def run(cluster: Any, tmp_path: Path, status: dict[str, Any], *argv: str) -> subprocess.Popen[str]:
    created = {"json": {"metadata": {"name": "chat-warm-x"}}}
    words = "get kvcacheoperations.kvpool.dev chat-warm-x"
    cluster(more={"create --filename=-": created, words: {"json": {"status": status}}})
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = [sys.executable, "-m", "kvpool_cli", *argv]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_an_operation_is_waited_for_and_its_counts_are_shown(cluster: Any, tmp_path: Path):
    status = {"phase": "Succeeded", "nodes": {"summary": "2/2"}, "results": {"local": {"blocks": 7}}}
    done = run(cluster, tmp_path, status, "warm", "kvpool-system/chat")
    out, err = done.communicate(timeout=60)
    assert done.returncode == 0
    assert "7 blocks" in out
    assert "Succeeded: 2/2 nodes" in err


def test_an_operation_that_fails_ends_with_1_and_names_the_nodes(cluster: Any, tmp_path: Path):
    status = {"phase": "Failed", "failures": [{"node": "node-1", "message": "no answer"}]}
    done = run(cluster, tmp_path, status, "warm", "kvpool-system/chat")
    out, _ = done.communicate(timeout=60)
    assert (done.returncode, "node-1: no answer" in out) == (1, True)


def test_ctrl_c_says_that_the_operation_continues_and_how_to_cancel_it(cluster: Any, tmp_path: Path):
    status = {"phase": "Running", "nodes": {"summary": "0/2"}}
    done = run(cluster, tmp_path, status, "warm", "kvpool-system/chat")
    assert done.stderr is not None
    for line in done.stderr:
        if "Running" in line:
            break
    done.send_signal(signal.SIGINT)
    _, err = done.communicate(timeout=60)
    assert done.returncode == 130
    assert "the operation continues" in err
    assert "delete kvop chat-warm-x" in err


def test_purge_needs_to_know_which_blocks(capsys: pytest.CaptureFixture[str]):
    from kvpool_cli import main as entry

    assert entry.main(["purge", "chat"]) == 2
    assert "--all" in capsys.readouterr().err
