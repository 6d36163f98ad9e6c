"""KV events of a node beside those of the vLLM that stored there: the same hashes, read by vLLM's own classes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest
from en_engine import ROOT, Engine, connector
from en_overlay import overlay

sys.path.insert(0, str(ROOT / "sidecar/tests"))  # isort: skip
import zmq
from cl_nodes import Cluster
from sc_router import Curve, Indexer, Message, Subscriber

from kvpool.protocol import keys

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

BLOCK, BLOCKS = 32, 9
PATIENT = {"deadlines": {"lookup_ms": 500, "load_min_ms": 2000}}
DECODE = """
import json, sys, msgspec
from vllm.distributed.kv_events import KVEventBatch
decoder = msgspec.msgpack.Decoder(KVEventBatch)
for line in sys.stdin:
    batch = decoder.decode(bytes.fromhex(line))
    events = [[type(e).__name__, {n: getattr(e, n) for n in e.__struct_fields__}] for e in batch.events]
    print(json.dumps([batch.ts, events, batch.data_parallel_rank], default=bytes.hex))
"""


def prompt(seed: int) -> list[int]:
    return [3 + (seed * 7919 + i * i * 31 + i) % 500 for i in range(BLOCKS * BLOCK + 9)]


def until(condition: Any, seconds: float = 20.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.05)
    return value


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("events"), ("a",), events={"hashes": "Bytes"})
    yield cluster
    cluster.close()


def hear(sock: zmq.Socket[bytes], seconds: float = 1.0) -> list[Message]:
    """What an engine has published since the last call."""
    messages = []
    while sock.poll(int(seconds * 1000)):
        messages.append(Message(sock.recv_multipart()))
    return messages


def decoded(python: str, path: list[Path], payloads: list[bytes]) -> list[Any]:
    """By vLLM's own classes, in the engine's Python."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), "VLLM_NO_USAGE_STATS": "1"}
    text = "".join(payload.hex() + "\n" for payload in payloads)
    run = subprocess.run(
        [python, "-c", DECODE], input=text, env=env, stdout=subprocess.PIPE, text=True, check=True, timeout=300
    )
    return [json.loads(line) for line in run.stdout.splitlines() if line.startswith("[")]


def test_a_nodes_events_speak_of_the_blocks_that_vllm_speaks_of(
    cluster: Cluster, start_engine: Callable[..., Engine], engine_home: Path
) -> None:
    node = cluster["a"]
    context = zmq.Context()
    try:
        own = context.socket(zmq.SUB)
        own.bind("tcp://127.0.0.1:*")
        own.setsockopt(zmq.SUBSCRIBE, b"")
        publish = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": own.getsockopt_string(zmq.LAST_ENDPOINT),
            "topic": "kv@engine@tiny",
        }
        engine = start_engine(
            connector(node.socket, **PATIENT),
            {"kv_events_config": publish},
            VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES="0",
        )
        until(lambda: engine.stats()["connected"])
        until(lambda: engine.generate(prompt(0)) and engine.ask(reset=True) and hear(own, 0.2))  # it is subscribed
        engine.generate(prompt(1))
        engine.settle()
        until(lambda: node.announced() >= 2 * BLOCKS)
        curve = Curve.of(*keys.events_curve_keys((cluster.secret / "pool-secret").read_bytes(), node.pool.uid, 0))
        with Subscriber("127.0.0.1", node.pool.events.port, node.pool.events.replay_port, curve=curve) as s:

            def all_told() -> Any:
                told = {h for m in s.replay() for e in m.events for h in e.get("block_hashes", ())}
                return len(told) >= 2 * BLOCKS and told

            told = until(all_told)
            messages = s.replay()
            fingerprint = engine.stats()["fingerprint"]
            heard = hear(own)
            gpu = [e for m in heard for e in m.events if e["type"] == "BlockStored" and e.get("medium") == "GPU"]
            computed = [h for e in gpu for h in e["block_hashes"]]
            assert len(computed) >= BLOCKS
            assert told >= set(computed[-BLOCKS:])

            # as llm-d keeps them: the engine's events bring tokens, the node's a tier
            indexer = Indexer()
            indexer.engine_stores("engine", computed[-BLOCKS:], first_key=0)
            for message in messages:
                indexer.hear(message, s)
            assert indexer.longest_prefix("a", 0, BLOCKS) == BLOCKS

            # as vLLM's own classes read them
            python, path = overlay("vllm-033", engine_home)
            payloads = [m.payload for m in messages]
            batches = decoded(python, path[1:], payloads)  # vLLM 0.32, which stored them
            newer = decoded(python, path, payloads)
            assert [[kind for kind, _ in events] for _, events, _ in newer] == [
                [kind for kind, _ in events] for _, events, _ in batches
            ]
            assert [e["block_hashes"] for _, events, _ in newer for kind, e in events if kind == "BlockStored"] == [
                e["block_hashes"] for _, events, _ in batches for kind, e in events if kind == "BlockStored"
            ]
            events = [event for batch in batches for event in batch[1]]
            assert events[0] == ["AllBlocksCleared", {}]
            stored = [e for kind, e in events if kind == "BlockStored"]
            chain: dict[str, str | None] = {}
            for e in stored:
                assert (e["medium"], e["locality"]) == ("STORAGE", "LOCAL")
                assert e["block_size"] == BLOCK
                parent = e["parent_block_hash"]
                for h in e["block_hashes"]:
                    chain[h], parent = parent, h
            walk, last = [], computed[-1].hex()
            while last:
                walk.append(last)
                last = chain[last]
            assert walk[::-1] == [h.hex() for h in computed[-BLOCKS:]]

            # and as a router asks
            body = {"tenant": "team", "fingerprint": fingerprint, "hashes": [h.hex() for h in computed[-BLOCKS:]]}
            token = keys.events_token((cluster.secret / "pool-secret").read_bytes(), node.pool.uid, 0)
            asking = urllib.request.Request(
                f"http://127.0.0.1:{node.http}/prefixes",
                json.dumps(body).encode(),
                {"Authorization": f"Bearer {token}"},
            )
            with urllib.request.urlopen(asking, timeout=5) as answer:
                assert json.loads(answer.read()) == {"nodes": {"a": BLOCKS}, "shared": 0, "complete": True}
    finally:
        context.destroy(linger=0)
