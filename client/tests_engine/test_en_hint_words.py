"""Session words at vLLM's real API server: four endpoints, each family of words, read by the endpoint plug-in."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import xxhash
from cl_nodes import Process, end_with_parent, free_port, until
from en_engine import GPU_PYTHON, ROOT, connector

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cl_nodes import Cluster

pytestmark = pytest.mark.skipif(bool(GPU_PYTHON), reason="the words need no GPU; the CPU's environment has the model")

MODEL = "kvpool-words"
TEXT = "A block is worth nothing without the blocks before it. " * 3  # one token per byte: several blocks
CHAT = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 2}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": TEXT, "max_tokens": 2},
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"input": TEXT, "max_output_tokens": 2, "store": False},
    "/v1/messages": CHAT,
}
START_S = 300


class Server(Process):
    """`vllm serve` with the pool's connector and the client's endpoint plug-in."""

    def __init__(self, home: Path, directory: Path, socket: str) -> None:
        self.port = free_port()
        super().__init__(directory / "server.log", [], {})
        path = directory / "path"
        (path / "kvpool-0.dist-info").mkdir(parents=True)  # what an installed client has: its entry points
        (path / "kvpool-0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: kvpool\nVersion: 0\n")
        (path / "kvpool-0.dist-info/entry_points.txt").write_text(
            "[vllm.endpoint_plugins]\nkvpool_words = kvpool.engines.vllm_words:plugin\n"
        )
        (path / "xxhash").symlink_to(Path(xxhash.__file__).parent)
        (path / "kvpool_cpu_worker.py").symlink_to(ROOT / "e2e/engine/kvpool_cpu_worker.py")
        self._environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("KVPOOL", "VLLM"))},
            "PYTHONPATH": os.pathsep.join(
                map(str, (ROOT / "client/src", path, home / "testing", home / "site-packages"))
            ),
            "PYTHONHASHSEED": "0",
            "VLLM_PLUGINS": "kvpool_words",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CACHE_ROOT": str(home / "vllm-cache"),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_HOST_IP": "127.0.0.1",
            "GLOO_SOCKET_IFNAME": "lo",
            "HF_HUB_OFFLINE": "1",
        }
        self._line = [
            *((home / "interpreter").read_text().strip(), "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(home / "model"), "--served-model-name", MODEL, "--host", "127.0.0.1"),
            *("--port", str(self.port), "--dtype", "float32", "--enforce-eager", "--max-model-len", "1024"),
            *("--max-num-seqs", "2", "--block-size", "32", "--distributed-executor-backend", "uni"),
            *("--kv-cache-memory-bytes", str(64 << 20), "--prefix-caching-hash-algo", "sha256_cbor"),
            *("--kv-transfer-config", connector(socket, host_bytes=64 << 20)),
        ]

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self._line, env=self._environment, stdout=log, stderr=log, preexec_fn=end_with_parent
            )

    def is_ready(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.log.read_text(errors="replace")[-3000:]
        try:
            return self.ask("GET", "/health")[0] == 200
        except OSError:
            return False

    def ask(
        self, method: str, path: str, body: dict[str, Any] | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            data = None if body is None else json.dumps({"model": MODEL, **body})
            connection.request(method, path, data, {"Content-Type": "application/json", **(headers or {})})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()


@pytest.fixture(scope="module")
def server(cluster: Cluster, engine_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = Server(engine_home, tmp_path_factory.mktemp("server"), cluster["a"].socket)
    made.start()
    try:
        assert until(made.is_ready, START_S), made.log.read_text(errors="replace")[-3000:]
        yield made
    finally:
        made.stop()


def counts(cluster: Cluster, kind: str) -> int:
    """Hints of a kind that the sidecar got, whatever became of them."""
    found: dict[str, int] = cluster["a"].status()["hints"]["results"]
    return sum(n for name, n in found.items() if name.startswith(f"{kind}-"))


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("kind", "headers", "body"),
    [
        ("keep", {}, {"kv_transfer_params": {"kvpool": {"session": "own", "after": "tool", "resume_in": 30}}}),
        ("ended", {"X-Dynamo-Session-ID": "run-42", "X-Dynamo-Session-Final": "true"}, {}),
        ("turn", {"x-claude-code-session-id": "cc-7"}, {}),
        ("ttl", {}, {"prompt_cache_key": "pk", "prompt_cache_retention": "24h"}),
    ],
)
def test_each_word_reaches_the_sidecar_from_each_endpoint(
    server: Server, cluster: Cluster, path: str, kind: str, headers: dict[str, str], body: dict[str, Any]
) -> None:
    before = counts(cluster, kind)
    status, reply = server.ask("POST", path, {**BODIES[path], **body}, headers)
    assert status == 200, reply
    # in one process vLLM finishes a request's stores in its next step
    assert server.ask("POST", "/v1/completions", {"prompt": "x", "max_tokens": 2})[0] == 200
    assert until(lambda: counts(cluster, kind) > before), cluster["a"].status()["hints"]


def test_a_streamed_answer_is_streamed(server: Server, cluster: Cluster) -> None:
    before = counts(cluster, "turn")
    body = {**BODIES["/v1/completions"], "stream": True, "session_id": "streams"}
    status, reply = server.ask("POST", "/v1/completions", body)
    assert status == 200
    assert reply.rstrip().endswith(b"data: [DONE]")
    assert server.ask("POST", "/v1/completions", {"prompt": "x", "max_tokens": 2})[0] == 200
    assert until(lambda: counts(cluster, "turn") > before)


def test_a_request_that_is_invalid_stays_vllms_to_refuse(server: Server) -> None:
    status, _ = server.ask("POST", "/v1/completions", {"prompt": 7, "session_id": "s"})
    assert status == 400
