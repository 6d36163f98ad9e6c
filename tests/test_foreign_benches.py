"""Adapters for benchmarks of other projects: their results as rows, and their storage interface over a real pool."""

from __future__ import annotations

import http.server
import threading
import time
import urllib.request
from types import SimpleNamespace

import numpy as np
import pytest
from bench import mlperf, serve
from bench.foreign.mlperf_worker import PoolBackend
from bench.foreign.proxy import RoundRobin
from bench.nodes import Network, Nodes

BLOCK = 64 * 1024


def result(read: float, p95: float) -> dict[str, object]:
    stats = {
        "tier_storage_read_bandwidth_gbps": read,
        "tier_storage_write_bandwidth_gbps": 0.5,
        "storage_read_p95_ms": p95,
        "read_iops": 7,
    }
    return {"summary": {"total_requests": 3, "cache_stats": stats}}


def test_rows_of_mlperf_are_compared_with_its_own_files_in_the_same_round():
    rows = [
        {"round": 0, **mlperf.row_of("files", result(0.5, 100.0), [])},
        {"round": 0, **mlperf.row_of("kvpool-peer", result(0.75, 50.0), [{"misses": {"evicted": 2, "busy": 1}}])},
        {"round": 1, **mlperf.row_of("files", result(0.0, 0.0), [])},
        {"round": 1, **mlperf.row_of("kvpool-peer", result(1.0, 50.0), [])},
    ]
    mlperf.add_ratios(rows)
    assert [(r["reads_ratio"], r["p95_ratio"]) for r in rows] == [(1.0, 1.0), (1.5, 0.5), (0.0, 0.0), (0.0, 0.0)]
    assert [r["missed_blocks"] for r in rows] == [0, 3, 0, 0]


def test_rows_of_vllm_bench_serve_are_compared_with_no_pool():
    found = {"completed": 5, "failed": 1, "median_ttft_ms": 40.0, "p95_ttft_ms": 90.0, "median_e2el_ms": 200.0}
    rows = [
        {"system": "none", **serve.of_vllm({**found, "median_ttft_ms": 80.0})},
        {"system": "kvpool", **serve.of_vllm(found)},
    ]
    serve.add_ratios(rows)
    assert [(r["failed"], r["ratio"]) for r in rows] == [(1, 1.0), (1, 0.5)]
    serve.add_ratios(alone := [{"system": "kvpool", **serve.of_vllm(found)}])
    assert alone[0]["ratio"] is None


def test_rows_of_multi_round_qa_count_only_answers():
    lines = [{"ttft": "0.1", "generation_time": "0.4"}, {"ttft": "0.3", "generation_time": "0.2"}]
    row = serve.of_multi_round_qa(lines)
    assert (row["requests"], row["ttft_p50_ms"], row["ttft_p95_ms"]) == (2, 200.0, 300.0)
    assert row["request_p50_ms"] == pytest.approx(500.0)
    with pytest.raises(ValueError, match="no question"):
        serve.of_multi_round_qa([])


@pytest.mark.parametrize("read", ["a", "b"], ids=["same node", "other node"])
def test_an_entry_of_mlperf_comes_back_as_it_was_written(tmp_path, read):
    network = Network("cubic", loopback=True)
    nodes = Nodes(tmp_path, network, 1 << 30)
    settings = {"write": nodes.socket_of("a"), "read": nodes.socket_of(read), "block_bytes": BLOCK}
    backend = PoolBackend(settings, SimpleNamespace)
    try:
        data = np.arange(5 * BLOCK // 2 + 7, dtype=np.float16).reshape(1, -1)
        assert backend.write("entry", data).total > 0
        deadline = time.monotonic() + 30
        while True:
            try:
                found, timing = backend.read("entry")
                break
            except KeyError:  # the other node does not know the blocks yet
                assert read == "b"
                assert time.monotonic() < deadline
                time.sleep(0.1)
        assert timing.total > 0
        assert found.dtype == data.dtype
        assert np.array_equal(found.view(np.uint16), data.view(np.uint16))
        assert sum(backend.counts()["hits"].values()) >= 3
        backend.delete("entry")
        with pytest.raises(KeyError):
            backend.read("entry")
    finally:
        backend.close()
        nodes.close()


def test_mlperf_without_the_benchmarks_folder_says_which_one_it_wants(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        mlperf.main(["--source", str(tmp_path)])
    assert "kv_cache_benchmark" in capsys.readouterr().err


def test_requests_go_to_the_servers_in_turn():
    seen: list[str] = []

    def server(name: str) -> http.server.ThreadingHTTPServer:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                seen.append(name)
                self.send_response(200)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=made.serve_forever, daemon=True).start()
        return made

    servers = [server("a"), server("b")]
    proxy = RoundRobin([f"http://127.0.0.1:{s.server_address[1]}" for s in servers])
    try:
        for n in range(4):
            with urllib.request.urlopen(f"{proxy.url}/v1/completions", data=b"%d" % n, timeout=30) as answer:
                assert answer.read() == b"%d" % n
        assert seen == ["a", "b", "a", "b"]
    finally:
        proxy.close()
        for one in servers:
            one.shutdown()
            one.server_close()
