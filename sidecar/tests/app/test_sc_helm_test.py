"""The script of `helm test` (charts/kvpool/files/tests/pool.py) against a real sidecar, as a pod would run it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from sc_nodes import Cluster

from kvpool.config import CLIENT_CONFIG_ENV, ClientConfig, dumps

SCRIPT = Path(__file__).resolve().parents[3] / "charts" / "kvpool" / "files" / "tests" / "pool.py"


def run(tmp_path, socket):
    notes = tmp_path / "annotations"
    notes.write_text('kvpool.dev/pool="kvpool-system/chat"\nkvpool.dev/injected="abc"\n')
    env = os.environ | {"TEST_POOL": "kvpool-system/chat", "TEST_ANNOTATIONS": str(notes)}
    env[CLIENT_CONFIG_ENV] = dumps(ClientConfig(socket=str(socket), connect_retry_ms=100))
    # as in the pod: the text is an argument
    text = SCRIPT.read_text().replace("WAIT_S = 60.0", f"WAIT_S = {60.0 if socket.exists() else 1.0}")
    command = [sys.executable, "-c", text]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=100, check=False)


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    with Cluster(tmp_path_factory.mktemp("helm"), index=False) as cluster:
        yield cluster.node("a", tenants=("team-a",))


def test_a_block_goes_to_the_pool_and_comes_back(tmp_path, node):
    done = run(tmp_path, node.sockets["team-a"])
    assert done.returncode == 0, done.stderr
    assert "came back from tier local" in done.stdout
    assert node.status()["stored"] == {"blocks": 1, "bytes": 1 << 20}


def test_a_node_without_a_sidecar_is_named_as_such(tmp_path):
    done = run(tmp_path, tmp_path / "nobody.sock")
    assert done.returncode == 1
    assert "is it one of the pool's nodes?" in done.stderr
