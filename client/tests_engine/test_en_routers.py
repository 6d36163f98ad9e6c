"""Dynamo reads the events of nodes: its indexer finds prompts by their tokens, its frontend routes them there."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from en_overlay import overlay

from cl_nodes import Cluster, end_with_parent, free_port  # isort: skip
from kvpool.client import Client
from kvpool.config import ClientConfig
from kvpool.protocol import keys
from kvpool.protocol.block import EngineBlock
from kvpool.protocol.router_blocks import RouterBlocks, pack_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cl_nodes import Node

BLOCK, PER_CHUNK, CHUNKS = 32, 4, 3
TOKENS = BLOCK * PER_CHUNK * CHUNKS
MODEL = "tiny"
REQUESTS = 12  # of one prompt, one after another: by chance they go to one of two workers once in 4,096 times


def prompt(seed: int) -> list[int]:
    return [3 + (seed * 7919 + i * i * 31 + i) % 250 for i in range(TOKENS + 9)]


def until(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.1)
    return value


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """For one test: a node publishes its blocks to a new subscriber once a minute at most."""
    events = {"prompt_tokens_of": "team", "authentication": "None", "topic": "kv@{node}@" + MODEL}
    cluster = Cluster(tmp_path_factory.mktemp("routers"), ("a", "b"), events=events)
    yield cluster
    cluster.close()


def stored(node: Node, seed: int) -> None:
    """Store the prompt's chunks with the names that the plug-in for vLLM gives them."""
    tokens, chunk = prompt(seed), BLOCK * PER_CHUNK
    hashes = [hashlib.sha256(b"%d/%d" % (seed, n)).digest() for n in range(CHUNKS * PER_CHUNK)]
    names = []
    for n in range(CHUNKS):
        own = hashes[n * PER_CHUNK : (n + 1) * PER_CHUNK]
        before = hashes[n * PER_CHUNK - 1] if n else b""
        packed = pack_tokens(tokens[n * chunk : (n + 1) * chunk])
        blocks = RouterBlocks(BLOCK, b"".join(h[-8:] for h in own), before[-8:], packed)
        names.append(EngineBlock(own[-1], before, bytes(4), chunk, 0, blocks))
    fingerprint = bytes(32)
    client = Client(ClientConfig(socket=node.socket), fingerprint=fingerprint)
    try:
        assert client.wait_connected(60)
        block_ids = [keys.block_id(fingerprint, name.engine_hash, name.part) for name in names]
        results = client.put_from(block_ids, [name.engine_hash * 128 for name in names], engine_blocks=names)
        assert all(result.ok for result in results)
    finally:
        client.close()


@contextlib.contextmanager
def process(arguments: list[str], log: Path, **env: str) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as out:
        made = subprocess.Popen(
            arguments, env={**os.environ, **env}, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
            preexec_fn=end_with_parent,
        )  # fmt: skip
        try:
            yield made
        finally:
            made.terminate()
            made.wait(30)


def post(port: int, path: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        return json.loads(answer.read())


def is_up(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2):
            return True
    except OSError:
        return False


def test_dynamos_indexer_finds_what_was_stored_before_and_after_it_came(
    cluster: Cluster, engine_home: Path, tmp_path: Path
) -> None:
    node, port = cluster["a"], free_port()
    events = node.pool.events
    stored(node, 0)
    python, path = overlay("dynamo", engine_home)
    arguments = [python, "-m", "dynamo.indexer", "--port", str(port), "--block-size", str(BLOCK), "--model-name", MODEL]
    with process(arguments, tmp_path / "indexer.log", PYTHONPATH=os.pathsep.join(map(str, path))):
        until(lambda: is_up(port))
        worker = {
            "instance_id": 7,
            "endpoint": f"tcp://127.0.0.1:{events.port}",
            "replay_endpoint": f"tcp://127.0.0.1:{events.replay_port}",
            "model_name": MODEL,
            "block_size": BLOCK,
        }
        post(port, "/register", worker)

        def matched(seed: int) -> int:
            found = post(port, "/query", {"token_ids": prompt(seed), "model_name": MODEL})["instances"]
            return found.get("7", {}).get("disk", 0)

        until(lambda: matched(0) == TOKENS)
        assert matched(1) == 0
        stored(node, 1)
        until(lambda: matched(1) == TOKENS)
        half = prompt(1)[: TOKENS // 2] + prompt(2)[TOKENS // 2 :]
        found = post(port, "/query", {"token_ids": half, "model_name": MODEL})["instances"]["7"]
        assert (found["longest_matched"], found["gpu"], found["cpu"]) == (TOKENS // 2, 0, 0)


def test_dynamos_frontend_sends_a_prompt_to_the_node_that_has_it(
    cluster: Cluster, engine_home: Path, tmp_path: Path
) -> None:
    """The real frontend and its KV router; workers of Dynamo that relay a node's events and have no engine."""
    python, path = overlay("dynamo", engine_home)
    port = free_port()
    env = {"PYTHONPATH": os.pathsep.join(map(str, path)), "DYN_FILE_KV": str(tmp_path / "kv"), "HF_HUB_OFFLINE": "1"}
    worker = [
        python,
        str(Path(__file__).parent / "dynamo_worker_process.py"),
        str(engine_home / "model"),
        MODEL,
        str(BLOCK),
    ]
    frontend = [
        *(python, "-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port)),
        *("--router-mode", "kv", "--kv-cache-block-size", str(BLOCK), "--discovery-backend", "file"),
        *("--request-plane", "tcp", "--event-plane", "zmq"),
    ]
    logs = {name: tmp_path / f"{name}.log" for name in ("a", "b")}
    stored(cluster["a"], 10)
    with contextlib.ExitStack() as stack:
        for name, log in logs.items():
            events = f"tcp://127.0.0.1:{cluster[name].pool.events.port}"
            stack.enter_context(process([*worker, events], log, **env))
        stack.enter_context(process(frontend, tmp_path / "frontend.log", **env))

        def requests() -> dict[str, int]:
            return {name: log.read_text(errors="replace").count("@@") for name, log in logs.items()}

        def workers_of(seed: int) -> set[str]:
            before = requests()
            for _ in range(REQUESTS):
                post(port, "/v1/completions", {"model": MODEL, "prompt": prompt(seed), "max_tokens": 1})
            return {name for name, count in requests().items() if count > before[name]}

        def is_served() -> bool:
            with contextlib.suppress(OSError):
                post(port, "/v1/completions", {"model": MODEL, "prompt": [5] * BLOCK, "max_tokens": 1})
                return any(requests().values())
            return False

        until(is_served)
        stored(cluster["b"], 11)
        until(lambda: workers_of(10) == {"a"})
        until(lambda: workers_of(11) == {"b"})
        assert workers_of(10) == {"a"}
