"""PoolTier inside a real vLLM: blocks move between engines, answers stay the same, no fault of the pool reaches them.

The tests of one module share two engines, one on each node, and build on each other's state only through prompts of
their own. An engine start takes about 20 seconds.
"""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import zmq
from cl_nodes import until
from en_engine import Engine, connector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from cl_nodes import Cluster

BLOCK = 32  # tokens, see engine_process.py
PATIENT = {"deadlines": {"lookup_ms": 500, "load_min_ms": 2000, "breaker_failures": 3, "breaker_cooldown_ms": 500}}


def prompt(seed: int, blocks: int = 9, more: int = 9) -> list[int]:
    return [3 + (seed * 7919 + i * i * 31 + i) % 500 for i in range(blocks * BLOCK + more)]


@pytest.fixture(scope="module")
def events() -> Iterator[zmq.Socket[bytes]]:
    """A subscriber to the KV events that the first engine publishes, as vLLM publishes them."""
    with zmq.Context() as context, context.socket(zmq.SUB) as subscriber:
        subscriber.bind("tcp://127.0.0.1:*")
        subscriber.setsockopt(zmq.SUBSCRIBE, b"")
        yield subscriber


@pytest.fixture(scope="module")
def engines(cluster: Cluster, start_engine: Callable[..., Engine], events: zmq.Socket[bytes]) -> tuple[Engine, Engine]:
    address = events.getsockopt_string(zmq.LAST_ENDPOINT)
    publish = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": address, "topic": "kv"}
    return start_engine(connector(cluster["a"].socket, **PATIENT), {"kv_events_config": publish}), start_engine(
        connector(cluster["b"].socket, **PATIENT)
    )


@pytest.fixture(scope="module")
def reference(start_engine: Callable[..., Engine]) -> Engine:
    """The same engine without any connector."""
    return start_engine("")


def stored(cluster: Cluster, node: str, engine: Engine, seed: int, **options: Any) -> dict[str, Any]:
    """Have `engine` compute a prompt of its own and wait until its blocks are on `node`, and in the index."""
    before = len(cluster[node].block_files())
    answer = engine.generate(prompt(seed), **options)
    engine.settle()
    assert until(lambda: len(cluster[node].block_files()) >= before + 9)
    assert until(lambda: cluster[node].announced() >= before + 9)
    return answer


def test_what_one_engine_computed_another_loads_from_its_node(
    cluster: Cluster, engines: tuple[Engine, Engine], reference: Engine
) -> None:
    a, b = engines
    first = stored(cluster, "a", a, 1)
    assert first["cached"] == 0
    assert until(lambda: (s := b.stats())["connected"] and s["fingerprint"] == a.stats()["fingerprint"])
    second = b.generate(prompt(1))
    assert second["cached"] == 9 * BLOCK
    assert second["tokens"] == first["tokens"] == reference.generate(prompt(1))["tokens"]
    stats = b.stats()
    assert stats["fingerprint_inputs"]["engine_config"] == "known"
    assert stats["fingerprint_inputs"]["model"]["files"]
    assert stats["tokens"] == {"peer": 9 * BLOCK}
    assert list(stats["requests"].values())[-1] == {"peer": 9 * BLOCK}
    b.settle()
    shown = [(n, labels["tier"], v) for n, labels, v in b.ask(metrics="kvpool")["metrics"] if "tier" in labels]
    assert ("kvpool:loaded_tokens_total", "peer", 9 * BLOCK) in shown


def test_vllms_own_events_say_what_reached_the_pool(
    cluster: Cluster, engines: tuple[Engine, Engine], events: zmq.Socket[bytes]
) -> None:
    while events.poll(100):
        events.recv_multipart()
    stored(cluster, "a", engines[0], 60)
    told = []

    def all_told() -> bool:
        engines[0].settle()
        while events.poll(100):
            batch = msgspec.msgpack.decode(events.recv_multipart()[2])
            told.extend(e for e in batch[1] if e["type"] == "BlockStored" and e["medium"] == "STORAGE")
        return sum(len(e["block_hashes"]) for e in told) >= 9

    assert until(all_told)
    assert {e["locality"] for e in told} == {"REMOTE"}


def test_an_engine_loads_its_own_blocks_back(cluster: Cluster, engines: tuple[Engine, Engine]) -> None:
    a, _ = engines
    first = stored(cluster, "a", a, 2)
    before = a.stats()["tokens"].get("local", 0)
    for seed in range(100, 130):  # 1230 blocks push it out of the engine's host memory, which holds 512
        a.generate(prompt(seed, blocks=40), max_tokens=1)
    assert a.ask(reset=True)["reset"]
    again = a.generate(prompt(2))
    assert again["tokens"] == first["tokens"]
    assert again["cached"] == 9 * BLOCK
    assert a.stats()["tokens"]["local"] == before + 9 * BLOCK


def test_a_salt_keeps_requests_apart(cluster: Cluster, engines: tuple[Engine, Engine]) -> None:
    a, b = engines
    stored(cluster, "a", a, 3, salt="one")
    assert b.generate(prompt(3), salt="two")["cached"] == 0
    assert b.generate(prompt(3))["cached"] == 0
    assert b.generate(prompt(3), salt="one")["cached"] == 9 * BLOCK


def test_a_longer_prompt_reuses_the_common_blocks(cluster: Cluster, engines: tuple[Engine, Engine]) -> None:
    a, b = engines
    stored(cluster, "a", a, 4)
    assert b.generate(prompt(4)[: 9 * BLOCK] + prompt(5))["cached"] == 9 * BLOCK


def test_a_damaged_block_is_recomputed(cluster: Cluster, engines: tuple[Engine, Engine], reference: Engine) -> None:
    a, b = engines
    known = set(cluster["a"].block_files())
    stored(cluster, "a", a, 6)
    fresh = sorted(set(cluster["a"].block_files()) - known, key=lambda f: f.stat().st_mtime_ns)
    for file in fresh[4:7]:
        data = bytearray(file.read_bytes())
        data[5000] ^= 1
        file.chmod(0o600)
        file.write_bytes(data)
    answer = b.generate(prompt(6))
    assert answer["tokens"] == reference.generate(prompt(6))["tokens"]
    assert answer["cached"] < 9 * BLOCK
    assert b.stats()["client"]["misses"].get("corrupt", 0) >= 1


def test_a_stopped_sidecar_delays_a_request_by_no_more_than_its_deadlines(
    cluster: Cluster, engines: tuple[Engine, Engine], reference: Engine
) -> None:
    a, b = engines
    stored(cluster, "a", a, 7)
    cluster["b"].signal(signal.SIGSTOP)
    try:
        for seed in (7, 8, 9):
            began = time.monotonic()
            answer = b.generate(prompt(seed))
            assert time.monotonic() - began < 0.5 + 2.0 + 1.5  # lookup, load, and the computing itself
            assert answer["tokens"] == reference.generate(prompt(seed))["tokens"]
            assert answer["cached"] == 0
    finally:
        cluster["b"].signal(signal.SIGCONT)
    assert until(lambda: b.stats()["connected"])
    stored(cluster, "a", a, 10)
    time.sleep(0.6)  # the breaker's cool-down
    assert until(lambda: b.generate(prompt(10))["cached"] == 9 * BLOCK)


def test_an_engine_goes_on_while_its_sidecar_is_away_and_uses_it_when_it_returns(
    cluster: Cluster, engines: tuple[Engine, Engine], reference: Engine
) -> None:
    a, b = engines
    stored(cluster, "a", a, 11)
    cluster["b"].stop(kill=True)
    answer = b.generate(prompt(11))
    assert answer["cached"] == 0
    assert answer["tokens"] == reference.generate(prompt(11))["tokens"]
    cluster["b"].start()
    cluster["b"].wait_ready()
    returned = time.monotonic()
    assert until(lambda: b.stats()["connected"], 5)
    assert time.monotonic() - returned < 5
    stored(cluster, "a", a, 12)
    assert until(lambda: b.generate(prompt(12))["cached"] == 9 * BLOCK)


def test_a_sidecar_that_dies_under_load_never_changes_an_answer(
    cluster: Cluster, engines: tuple[Engine, Engine], reference: Engine
) -> None:
    a, b = engines
    for seed in range(20, 26):
        stored(cluster, "a", a, seed)
    for seed in range(20, 26):
        if seed % 2:
            cluster["b"].stop(kill=True)
        elif cluster["b"].process is None:
            cluster["b"].start()
            cluster["b"].wait_ready()
        assert b.generate(prompt(seed))["tokens"] == reference.generate(prompt(seed))["tokens"]
    cluster["b"].start()
    cluster["b"].wait_ready()


def test_after_a_reset_of_the_connector_an_engine_shares_nothing(
    cluster: Cluster, engines: tuple[Engine, Engine]
) -> None:
    a, b = engines
    stored(cluster, "a", a, 30)
    before = b.stats()["fingerprint"]
    assert b.ask(reset_all=True)["reset"]
    assert b.stats()["fingerprint"] != before
    assert until(lambda: b.stats()["connected"])
    assert b.generate(prompt(30))["cached"] == 0


def test_a_pause_keeps_the_blocks_and_new_weights_do_not(cluster: Cluster, start_engine: Callable[..., Engine]) -> None:
    """Sleep of level 1 pauses like this; sleep itself needs a GPU."""
    engine = start_engine(connector(cluster["a"].socket, **PATIENT))
    assert until(lambda: engine.stats()["connected"])
    first = stored(cluster, "a", engine, 160)
    before = engine.stats()
    assert engine.ask(pause=True)["paused"]
    again = engine.generate(prompt(160))
    assert again["tokens"] == first["tokens"]
    assert again["cached"] == 9 * BLOCK
    after = engine.stats()
    assert after["fingerprint"] == before["fingerprint"]
    assert sum(after["tokens"].values()) - sum(before["tokens"].values()) == 9 * BLOCK
    assert engine.ask(rpc="reload_weights")["results"] == 1
    assert engine.stats()["fingerprint"] != before["fingerprint"]
    assert engine.ask(pause=True)["paused"]
    assert until(lambda: engine.stats()["connected"])
    assert engine.generate(prompt(160))["cached"] == 0
    engine.close()


def test_an_engine_without_a_sidecar_starts_serves_and_connects_when_there_is_one(
    cluster: Cluster, start_engine: Callable[..., Engine], reference: Engine, tmp_path: Path
) -> None:
    late = tmp_path / "kv.sock"
    engine = start_engine(connector(str(late), **PATIENT))
    answer = engine.generate(prompt(40))
    assert answer["tokens"] == reference.generate(prompt(40))["tokens"]
    assert not engine.stats()["connected"]
    os.symlink(cluster["a"].socket, late)
    arrived = time.monotonic()
    assert until(lambda: engine.stats()["connected"], 5)
    assert time.monotonic() - arrived < 5
    stored(cluster, "a", engine, 41)
    engine.close()


def test_the_plugin_gives_an_engine_its_connector(
    cluster: Cluster, start_engine: Callable[..., Engine], tmp_path: Path
) -> None:
    info = tmp_path / "kvpool-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvpool\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nkvpool = kvpool.engines.vllm_plugin:register\n")
    engine = start_engine(
        "",
        KVPOOL_VLLM_KV_TRANSFER_CONFIG=connector(cluster["a"].socket, **PATIENT),
        EXTRA_PYTHONPATH=str(tmp_path),
    )
    assert engine.ready["algo"] == "sha256_cbor"
    stored(cluster, "a", engine, 50)
    assert engine.stats()["connected"]
    engine.close()
