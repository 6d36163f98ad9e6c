"""Conversations that change nodes at every turn get the answers of conversations that never moved, token by token.

Engines in float32, where another split of the prefill rounds to the same token; what bfloat16 does is in
test_en_vllm.py. The two engines are short of memory on purpose: they compute prompts in pieces and preempt.
"""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING, Any

import pytest
from cl_nodes import until
from en_engine import Engine, connector
from en_talk import BLOCK, ROUNDS, Talk, full_blocks, openings, question, words

if TYPE_CHECKING:
    from collections.abc import Callable

    from cl_nodes import Cluster, Node

TALKS = int(os.environ.get("KVPOOL_CONVERSATIONS", "24"))  # `make test-conversations` has 500
AT_ONCE = 24
HOST = 64 << 20
PATIENT = {"deadlines": {"lookup_ms": 1000, "load_min_ms": 4000, "breaker_failures": 3, "breaker_cooldown_ms": 500}}
SHORT = {
    "max_num_seqs": 16, "max_model_len": 1024, "num_gpu_blocks_override": 40,
    "max_num_batched_tokens": 128,
}  # fmt: skip
ROOMY = {"max_num_seqs": 16}


@pytest.fixture(scope="module")
def engines(cluster: Cluster, start_engine: Callable[..., Engine]) -> dict[str, Engine]:
    return {
        name: start_engine(connector(cluster[name].socket, host_bytes=HOST, **PATIENT), SHORT) for name in ("a", "b")
    }


@pytest.fixture(scope="module")
def reference(start_engine: Callable[..., Engine]) -> Engine:
    """With room and without a connector. Its own prefix cache works, unless a salt is given that nobody else has."""
    return start_engine("", ROOMY)


@pytest.fixture(scope="module")
def moved(cluster: Cluster, engines: dict[str, Engine]) -> tuple[list[Talk], list[list[tuple[int, int]]]]:
    """The conversations after ROUNDS turns, each on the other node than the last; per round (cached, to be found)."""
    talks = openings(TALKS)
    known: set[tuple[int, ...]] = set()
    due = dict.fromkeys(engines, 0)
    hits = []
    for turn in range(ROUNDS):
        found: list[tuple[int, int]] = []
        for side, (name, engine) in enumerate(engines.items()):
            mine = [talk for talk in talks if (talk.number + turn) % 2 == side]
            before = [len(full_blocks(talk.history)) * BLOCK if turn else 0 for talk in mine]
            answers = in_batches(engine, [talk.request(question(talk.number, turn)) for talk in mine])
            for talk, answer, least in zip(mine, answers, before, strict=True):
                talk.hear(answer["tokens"])
                found.append((answer["cached"], least))
            engine.settle()
            new = set().union(*(full_blocks(talk.history) for talk in mine)) - known
            due[name] += len(new)
            known |= new  # what the first has stored the second may find
        hits.append(found)
        for name in engines:
            wait_stored(cluster[name], due[name])
    return talks, hits


def wait_stored(node: Node, blocks: int) -> None:
    assert until(lambda: len(node.block_files()) >= blocks), (len(node.block_files()), blocks)
    assert until(lambda: node.announced() >= blocks), (node.announced(), blocks)


def in_batches(engine: Engine, wanted: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [answer for at in range(0, len(wanted), AT_ONCE) for answer in engine.batch(wanted[at : at + AT_ONCE])]


def replay(engine: Engine, salt: str = "") -> list[list[list[int]]]:
    """The answers of the same conversations on one engine; with `salt` nothing is ever found in its cache."""
    talks = openings(TALKS)
    for turn in range(ROUNDS):
        wanted = [t.request(question(t.number, turn), salt and f"{salt}-{t.number}-{turn}") for t in talks]
        for talk, answer in zip(talks, in_batches(engine, wanted), strict=True):
            assert not (salt and answer["cached"])
            talk.hear(answer["tokens"])
    return [talk.answers for talk in talks]


def test_the_model_is_a_good_witness(reference: Engine) -> None:
    """A wrong block anywhere would show: without that, equal answers say nothing."""
    text = words(6900, 9 * BLOCK + 5)
    wrong = [text[: at * BLOCK] + words(6950 + at, BLOCK) + text[(at + 1) * BLOCK :] for at in range(9)]
    right, *others = reference.batch([{"prompt": t, "max_tokens": 16} for t in [text, *wrong]])
    for other in others:
        assert sum(a != b for a, b in zip(right["tokens"], other["tokens"], strict=True)) > 8


def test_conversations_that_move_at_every_turn_answer_as_if_they_had_never_moved(
    moved: tuple[list[Talk], Any], reference: Engine
) -> None:
    talks, _ = moved
    stayed = replay(reference)
    assert [talk.answers for talk in talks] == stayed
    assert len({str(answers) for answers in stayed}) == TALKS  # they say different things


def test_they_answer_as_without_any_cache(moved: tuple[list[Talk], Any], reference: Engine) -> None:
    talks, _ = moved
    assert [talk.answers for talk in talks] == replay(reference, salt="nobody")


def test_what_they_said_before_they_moved_is_found(moved: tuple[Any, list[list[tuple[int, int]]]]) -> None:
    _, hits = moved
    for turn in range(1, ROUNDS):
        cached, there = (sum(column) for column in zip(*hits[turn], strict=True))
        assert cached >= 0.9 * there > 0  # the pool may lose a block


def test_the_engines_were_short_of_memory_and_computed_prompts_in_pieces(
    moved: tuple[list[Talk], Any], engines: dict[str, Engine]
) -> None:
    talks, _ = moved
    assert sum(engine.counter("vllm:num_preemptions") for engine in engines.values()) > 0
    assert max(len(talk.history) for talk in talks) > SHORT["max_num_batched_tokens"]


def test_a_prompt_shorter_than_a_block_leaves_nothing(cluster: Cluster, engines: dict[str, Engine], moved: Any) -> None:
    before = len(cluster["a"].block_files())
    short = words(7000, BLOCK - 12)
    first = engines["a"].generate(short, max_tokens=6)
    engines["a"].settle()
    again = engines["b"].generate(short, max_tokens=6)
    assert again["tokens"] == first["tokens"]
    assert again["cached"] == 0
    assert len(cluster["a"].block_files()) == before


def test_seeded_answers_with_salts_stay_apart(cluster: Cluster, engines: dict[str, Engine], moved: Any) -> None:
    text = words(7100, 5 * BLOCK + 3)
    before = len(cluster["a"].block_files())
    first = engines["a"].generate(text, salt="one", seed=5)
    engines["a"].settle()
    wait_stored(cluster["a"], before + 5)
    assert engines["b"].generate(text, salt="two", seed=5) | {"seconds": 0} == first | {"seconds": 0}
    again = engines["b"].generate(text, salt="one", seed=5)
    assert again["tokens"] == first["tokens"]
    assert again["cached"] == 5 * BLOCK


def test_a_peer_that_dies_in_the_middle_of_a_load_costs_the_load_and_nothing_else(
    cluster: Cluster, engines: dict[str, Engine], reference: Engine, moved: Any
) -> None:
    text = words(7200, 20 * BLOCK + 3)
    before = len(cluster["a"].block_files())
    engines["a"].generate(text)
    engines["a"].settle()
    wait_stored(cluster["a"], before + 20)
    missed = sum(engines["b"].stats()["client"]["misses"].values())
    cluster["a"].signal(signal.SIGSTOP)  # the index says the blocks are there; their node takes the call and is silent
    killer = threading.Timer(0.4, cluster["a"].stop, kwargs={"kill": True})
    killer.start()
    try:
        answer = engines["b"].generate(text)
    finally:
        killer.join()
        cluster["a"].start()
        cluster["a"].wait_ready()
    assert answer["tokens"] == reference.generate(text)["tokens"]
    assert answer["cached"] < 20 * BLOCK
    assert sum(engines["b"].stats()["client"]["misses"].values()) > missed


def test_an_engine_with_a_full_pool_answers_the_same(
    cluster: Cluster, start_engine: Callable[..., Engine], reference: Engine
) -> None:
    small = cluster.add("small", capacity=2 << 20)  # about 55 blocks
    engine = start_engine(connector(small.socket, host_bytes=HOST, **PATIENT), SHORT)
    texts = [words(7300 + i, 8 * BLOCK + 3) for i in range(16)]
    for text in texts + texts[-4:]:
        assert engine.generate(text)["tokens"] == reference.generate(text)["tokens"]
    engine.settle()
    assert until(lambda: 0 < len(small.block_files()) * (32 << 10) <= 2 << 20)
    engine.close()


def test_an_engine_that_is_killed_in_the_middle_of_its_stores_leaves_whole_blocks_only(
    cluster: Cluster, engines: dict[str, Engine], reference: Engine, moved: Any
) -> None:
    a, b = engines["a"], engines["b"]
    known = len(cluster["a"].block_files())
    texts = [words(7400 + i, 24 * BLOCK + 3) for i in range(6)]
    killer = threading.Thread(
        target=lambda: until(lambda: len(cluster["a"].block_files()) > known) and a.process.kill(), daemon=True
    )
    killer.start()
    with pytest.raises((RuntimeError, OSError)):  # the engine is gone
        a.batch([{"prompt": text, "max_tokens": 200} for text in texts])
    killer.join()
    for text in texts:
        assert b.generate(text)["tokens"] == reference.generate(text)["tokens"]
    assert not b.stats()["client"]["misses"].get("corrupt")
