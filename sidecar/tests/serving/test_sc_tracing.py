"""Spans of a client's calls arrive at a real OTLP receiver, below the engine's trace, and hold no content."""

from __future__ import annotations

import http.server
import os
import subprocess
import sys
import threading
import time

import pytest
from sc_nodes import wait_for
from sc_raw import FINGERPRINT, block_id, payload

from kvpool import tracing
from kvpool.client import Client
from kvpool.config import ClientConfig
from kvpool.engines.common.jobs import TransferJobs

pytest.importorskip("opentelemetry.sdk", reason="the packages of the extra otel are not installed: make setup")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE}-00f067aa0ba902b7-01"


class Receiver:
    """An OTLP/HTTP receiver on loopback; `spans` are those of all requests."""

    def __init__(self) -> None:
        self.spans: list = []
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                request = ExportTraceServiceRequest()
                request.ParseFromString(self.rfile.read(int(self.headers["Content-Length"])))
                for resource in request.resource_spans:
                    for scope in resource.scope_spans:
                        outer.spans += scope.spans
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def receiver(monkeypatch):
    one = Receiver()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", one.endpoint)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    monkeypatch.setenv(tracing.TRACING_ENV, "true")
    monkeypatch.setattr(tracing, "_configured", False)
    monkeypatch.setattr(tracing, "_tracer", None)
    made = []
    provider_of = tracing._otlp_provider
    monkeypatch.setattr(tracing, "_otlp_provider", lambda: made.append(provider_of()) or made[-1])
    yield one
    for provider in made:
        provider.shutdown()
    one.close()


def attributes(span) -> dict:
    return {a.key: a.value.string_value or a.value.int_value for a in span.attributes}


def test_lookup_load_by_tier_and_store_are_children_of_the_engines_span(cluster, receiver):
    node = cluster(index=False).node("a")
    client = Client(ClientConfig(socket=str(node.sockets["team-a"])), fingerprint=FINGERPRINT)
    assert client.wait_connected(10)
    ids, buffers = [block_id(n) for n in range(2)], [bytearray(64 * 1024) for _ in range(3)]
    with tracing.parent(PARENT):
        client.put_from(ids, [payload(n) for n in range(2)], time.monotonic() + 10)
        client.lookup([*ids, block_id(9)], time.monotonic() + 10)
        client.get_into([*ids, block_id(9)], buffers, time.monotonic() + 10)
    client.lookup(ids, time.monotonic() + 10)
    client.close()
    wait_for(lambda: len(receiver.spans) >= 5, "five spans arrived", timeout=30)
    spans = {s.name: s for s in receiver.spans if s.trace_id.hex() == TRACE}
    assert set(spans) == {"kvpool.store", "kvpool.lookup", "kvpool.load", "kvpool.load.tier"}
    assert {s.name for s in receiver.spans if s.trace_id.hex() != TRACE} == {"kvpool.lookup"}, "without a parent"
    for name in ("kvpool.store", "kvpool.lookup", "kvpool.load"):
        assert spans[name].parent_span_id.hex() == "00f067aa0ba902b7"
    tier = spans["kvpool.load.tier"]
    assert tier.parent_span_id == spans["kvpool.load"].span_id
    assert 0 < tier.end_time_unix_nano - tier.start_time_unix_nano < 60e9
    assert attributes(tier) == {"kvpool.tier": "local", "kvpool.blocks": 2, "kvpool.bytes": 2 * 64 * 1024}
    assert attributes(spans["kvpool.lookup"])["kvpool.found_blocks"] == 2
    assert attributes(spans["kvpool.store"])["kvpool.stored_blocks"] == 2
    assert sum(n for key, n in attributes(spans["kvpool.load"]).items() if key.startswith("kvpool.misses.")) == 1
    sent = b"".join(s.SerializeToString() for s in receiver.spans)
    assert not any(secret in sent for secret in (ids[0], ids[0].hex().encode(), b"team-a"))


def test_a_receiver_that_is_away_costs_no_hit(cluster, monkeypatch, receiver):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    node = cluster(index=False).node("a")
    client = Client(ClientConfig(socket=str(node.sockets["team-a"])), fingerprint=FINGERPRINT)
    assert client.wait_connected(10)
    ids = [block_id(1)]
    assert client.put_from(ids, [payload(1)], time.monotonic() + 10)[0].stored
    assert client.get_into(ids, [bytearray(64 * 1024)], time.monotonic() + 10)[0].ok
    client.close()


@pytest.mark.parametrize("text", ["", "zz", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "x" * 500, None, 7])
def test_a_traceparent_that_is_none_is_ignored(receiver, text):
    assert tracing.configure()
    with tracing.parent(text):
        span = tracing.start("kvpool.lookup", 1)
        assert span.parent is None
        span.end()


def test_nothing_is_imported_and_no_span_is_made_while_tracing_is_off():
    code = (
        "import sys; from kvpool import tracing; assert not tracing.configure({}); "
        "assert tracing.start('kvpool.lookup', 1) is None\n"
        "with tracing.parent('00-x'): pass\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]"
    )
    env = {k: v for k, v in os.environ.items() if k != tracing.TRACING_ENV}
    subprocess.run([sys.executable, "-c", code], check=True, env=env)


def test_without_the_packages_the_client_works_and_says_so(monkeypatch, caplog):
    monkeypatch.setattr(tracing, "_configured", False)
    monkeypatch.setattr(tracing, "_tracer", None)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    assert not tracing.configure({tracing.TRACING_ENV: "true"})
    assert "no spans are recorded" in caplog.text


def test_a_job_of_an_engine_is_below_the_traceparent_of_its_request(cluster, receiver):
    node = cluster(index=False).node("a")
    client = Client(ClientConfig(socket=str(node.sockets["team-a"])), fingerprint=FINGERPRINT)
    assert client.wait_connected(10)
    jobs = TransferJobs(1, 64)
    jobs.submit_load(1, client, [block_id(1)], [memoryview(bytearray(64))], PARENT)
    wait_for(lambda: jobs.take_finished(), "the job ends")
    jobs.close()
    client.close()
    wait_for(lambda: [s for s in receiver.spans if s.name == "kvpool.load"], "its span arrived", timeout=30)
    assert {s.trace_id.hex() for s in receiver.spans if s.name == "kvpool.load"} == {TRACE}
