"""Why an engine runs without the pool reaches /status, bounded, and never makes it count as connected."""

from __future__ import annotations

import pytest
from sc_nodes import wait_for
from sc_raw import FINGERPRINT

from kvpool.client import Client
from kvpool.config import ClientConfig
from kvpool.engines.common import without_pool
from kvpool.errors import ProtocolError
from kvpool.protocol import wire
from kvpool_operator.sidecars.status import SidecarStatus
from kvpool_sidecar.serving.fingerprints import Fingerprints
from kvpool_sidecar.serving.messages import decode_report


@pytest.fixture
def node(cluster):
    return cluster(index=False).node("a")


def test_the_sentence_reaches_the_status_and_ends_when_the_engine_connects(node):
    path = str(node.sockets["team-a"])
    assert without_pool.send_problem(path, "vLLM 0.32 is supported,\nthis is 0.31" + "x" * 900, "vllm")
    status = node.status()
    assert [row["problem"][:44] for row in status["engine_problems"]] == [
        "vLLM 0.32 is supported, this is 0.31xxxxxxxx"
    ]
    assert len(status["engine_problems"][0]["problem"]) == without_pool.MAX_PROBLEM
    assert (status["connected_pods"], status["fingerprints"]) == ([], [])
    parsed = SidecarStatus.parse(status)
    assert list(parsed.engine_problems) == [status["engine_problems"][0]["uid"]]
    client = Client(ClientConfig(socket=path), fingerprint=FINGERPRINT)
    wait_for(lambda: node.status()["connected_pods"], "the engine is connected")
    assert node.status()["engine_problems"] == []
    client.close()


def test_no_sidecar_is_no_error(tmp_path):
    assert not without_pool.send_problem(str(tmp_path / "kv.sock"), "x", "vllm")


def test_a_process_reports_its_first_sentence_in_the_background(node, monkeypatch):
    monkeypatch.setattr(without_pool, "_reporting", None)
    monkeypatch.setattr(without_pool, "_RETRY_S", 0.1)
    monkeypatch.setenv("KVPOOL_CLIENT_CONFIG", f'{{"socket": "{node.sockets["team-a"]}"}}')
    without_pool.report_without_pool("first", "vllm")
    without_pool.report_without_pool("second", "vllm")
    wait_for(lambda: [row["problem"] for row in node.status()["engine_problems"]] == ["first"], "it is reported")


def test_a_fingerprint_shows_whether_its_engine_is_tested():
    known = Fingerprints()
    for first, tested in ((b"t", True), (b"u", False)):
        known.entered(wire.ClientHello(first * 32, is_tested=tested), "uid")
    assert {entry["digest"][:2]: entry["tested"] for entry in known.latest()} == {"74": True, "75": False}


def test_problems_are_bounded_and_must_be_text():
    known = Fingerprints()
    for n in range(200):
        known.report_problem(f"uid-{n}", "x")
    assert len(known.problems()) == 64
    assert decode_report(memoryview(wire.pack_json({"problem": "x" * 900}))).problem == "x" * 200
    with pytest.raises(ProtocolError):
        decode_report(memoryview(wire.pack_json({"problem": ["x"]})))
