"""Session hints of a real vLLM: agents that pause for tools, and sessions that end, on a drive that is too small."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from cl_nodes import Node, until
from en_engine import Engine, connector

if TYPE_CHECKING:
    from collections.abc import Callable

    from cl_nodes import Cluster

BLOCK = 32  # tokens, see engine_process.py
BLOCKS = 9  # of a prompt
PATIENT = {"deadlines": {"lookup_ms": 500, "load_min_ms": 2000, "breaker_failures": 3, "breaker_cooldown_ms": 500}}
FILE = 36 << 10  # bytes of a block's file: 32 KiB of the tiny model's KV, and a header
ROOM = 120  # blocks


def prompt(seed: int) -> list[int]:
    return [3 + (seed * 7919 + i * i * 31 + i) % 500 for i in range(BLOCKS * BLOCK + 9)]


def results(node: Node) -> dict[str, int]:
    return node.status()["hints"]["results"]


@pytest.fixture(scope="module")
def node(cluster: Cluster) -> Node:
    """A node whose drive holds about a dozen prompts."""
    return cluster.add("small", capacity=ROOM * FILE)


@pytest.fixture(scope="module")
def engine(node: Node, start_engine: Callable[..., Engine]) -> Engine:
    return start_engine(connector(node.socket, **PATIENT))


def turn(engine: Engine, node: Node, seed: int, **kvpool: Any) -> None:
    """One request of an agent; what it says of its session has reached the sidecar when this returns."""
    before = sum(results(node).values())
    engine.generate(prompt(seed), transfer={"kvpool": kvpool} if kvpool else None)
    engine.settle()
    assert not kvpool or until(lambda: sum(results(node).values()) > before), results(node)


def test_a_session_that_ended_frees_room_and_one_that_waits_for_a_tool_keeps_its_blocks(
    node: Node, engine: Engine, start_engine: Callable[..., Engine]
) -> None:
    other = start_engine(connector(node.socket, **PATIENT))
    assert until(lambda: engine.stats()["connected"] and other.stats()["connected"])
    for seed in range(10, 14):
        turn(engine, node, seed)
    turn(engine, node, 2, session="over", after="ended")
    turn(
        engine, node, 3, session="waits", after="tool", resume_in=30
    )  # a pause far beyond what the drive holds keeps nothing
    assert results(node) == {"ended-accepted": 1, "keep-accepted": 1}
    for seed in range(14, 21):
        turn(engine, node, seed)
    assert until(lambda: node.status()["blocks"] <= ROOM * 85 // 100)
    loaded = {seed: other.generate(prompt(seed))["cached"] for seed in (2, 3)}
    assert loaded == {2: 0, 3: BLOCKS * BLOCK}, results(node)


def test_an_orchestrators_end_on_a_request_of_its_own_is_the_sessions(node: Node, engine: Engine) -> None:
    turn(engine, node, 30, session="dynamo")
    action = {
        "action_id": "1",
        "action_type": "kvpool.release",
        "action_version": "1",
        "payload": {"session": "dynamo"},
    }
    envelope = {"protocol_version": "1", "message_id": "m", "actions": [action]}
    before = results(node).get("ended-accepted", 0)
    engine.generate([5, 6, 7], max_tokens=2, transfer={"kv_hint": envelope})
    engine.settle()
    assert until(lambda: results(node).get("ended-accepted", 0) == before + 1), results(node)


@pytest.mark.parametrize(
    "transfer",
    [
        {"kvpool": "ended"},
        {"kvpool": {"session": ["x"], "after": {}, "resume_in": "soon", "ttl": -1}},
        {"kvpool": {"session": "x" * 9999}},
        {"kv_hint": {"actions": [1, None, {"action_type": 7, "payload": []}]}},
    ],
)
def test_an_invalid_hint_fails_no_request(node: Node, engine: Engine, transfer: dict[str, Any]) -> None:
    before = results(node)
    assert engine.generate(prompt(3), transfer=transfer)["tokens"] == engine.generate(prompt(3))["tokens"]
    engine.settle()
    assert results(node) == before
