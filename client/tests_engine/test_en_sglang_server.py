"""SGLang's real server on two nodes: conversations that change nodes, metrics, flushes and new weights.

Its copies between device and host are those of sglang_on_path; requests, tree, controllers and storage are its own.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import en_model
import pytest
from cl_nodes import until
from en_sglang_server import PAGE, SGLangServer
from en_talk import ANSWER, ROUNDS, Talk, words

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from cl_nodes import Cluster, Node

TALKS = int(os.environ.get("KVPOOL_CONVERSATIONS", "8"))  # `make test-conversations` has 500
AT_ONCE = 8


@pytest.fixture(scope="module")
def servers(
    engine_home: Path, tiny_model: Path, cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, SGLangServer]]:
    made: dict[str, SGLangServer] = {}
    try:
        for name in "ab":
            home = tmp_path_factory.mktemp(f"sglang-{name}")
            made[name] = SGLangServer(engine_home, tiny_model, home, cluster[name].socket)
        for server in made.values():
            server.wait_ready()
        assert until(lambda: all(node.status()["connected_pods"] for node in cluster.nodes.values()))
        yield made
    finally:
        for server in made.values():
            server.stop()


def wait_stored(node: Node, pages: int) -> None:
    """A page is two blocks, of keys and of values."""
    assert until(lambda: node.announced() >= 2 * pages, 120), (node.announced(), 2 * pages)


def whole_pages(tokens: list[int]) -> set[tuple[int, ...]]:
    """The prefixes of whole pages that SGLang hands to the pool: the last token was not computed yet."""
    return {tuple(tokens[:end]) for end in range(PAGE, len(tokens), PAGE)}


def openings() -> list[Talk]:
    """Four conversations in a row begin with one text."""
    return [Talk(n, words(n // 4, 4 * PAGE + 40) + words(100 + n, 20 + 9 * (n % 7))) for n in range(TALKS)]


def question(number: int, turn: int) -> list[int]:
    return words(1000 * turn + number, 30 + 7 * (number % 6))


def answers_of(server: SGLangServer, talks: list[Talk], turn: int, salt: str = "") -> list[dict[str, int]]:
    """One turn of all talks. Returns the cached tokens of each prompt by source."""

    def speak(talk: Talk) -> dict[str, int]:
        talk.history += question(talk.number, turn)
        answer = server.generate(talk.history, ANSWER, salt and f"{salt}-{talk.number}-{turn}")
        talk.hear(answer.pop("tokens"))
        return answer

    with ThreadPoolExecutor(AT_ONCE) as threads:
        return list(threads.map(speak, talks))


def test_conversations_that_change_servers_at_every_turn_answer_as_without_any_cache(
    cluster: Cluster, servers: dict[str, SGLangServer]
) -> None:
    talks = openings()
    known: set[tuple[int, ...]] = set()
    due = {name: cluster[name].announced() // 2 for name in servers}
    for turn in range(ROUNDS):
        for side, (name, server) in enumerate(servers.items()):
            mine = [talk for talk in talks if (talk.number + turn) % 2 == side]
            there = [len(whole_pages(talk.history)) * PAGE for talk in mine]
            cached = answers_of(server, mine, turn)
            new = set().union(*(whole_pages(talk.history) for talk in mine)) - known
            due[name] += len(new)
            known |= new
            if turn:
                assert sum(sum(sources.values()) for sources in cached) >= 0.9 * sum(there)
                assert sum(sources["storage"] for sources in cached) > 0
        for name in servers:
            wait_stored(cluster[name], due[name])
    alone = openings()
    for turn in range(ROUNDS):
        found = answers_of(servers["b"], alone, turn, "no other request has this salt")
        assert not any(sum(sources.values()) for sources in found)
    assert [talk.answers for talk in talks] == [talk.answers for talk in alone]
    assert len({str(talk.answers) for talk in talks}) == TALKS  # they say different things


def test_what_the_pool_gave_shows_in_the_metrics_of_the_server_and_of_the_node(
    cluster: Cluster, servers: dict[str, SGLangServer]
) -> None:
    a, b = servers["a"], servers["b"]
    text = words(7000, 6 * PAGE + 5)
    stored = cluster["a"].announced() // 2
    tokens = b.metric("sglang:cached_tokens_total", cache_source="storage")
    pages = b.metric("sglang:prefetch_pgs_sum", storage_backend="dynamic")
    from_peers = cluster["b"].status()["hits"]["peer"]
    first = a.generate(text)
    wait_stored(cluster["a"], stored + 6)
    again = b.generate(text)
    assert (first["storage"], again["storage"], again["tokens"]) == (0, 6 * PAGE, first["tokens"])
    assert until(lambda: b.metric("sglang:cached_tokens_total", cache_source="storage") == tokens + 6 * PAGE)
    b.generate(text)  # SGLang publishes a storage's figures with those of its next batch
    assert until(lambda: b.metric("sglang:prefetch_pgs_sum", storage_backend="dynamic") == pages + 12)
    assert until(lambda: cluster["b"].status()["hits"]["peer"] == from_peers + 12)


def test_a_flush_forgets_no_pages_and_new_weights_share_none(
    cluster: Cluster, servers: dict[str, SGLangServer], tiny_model: Path, tmp_path: Path
) -> None:
    a, b = servers["a"], servers["b"]
    text = words(7200, 6 * PAGE + 5)
    stored = cluster["a"].announced() // 2
    first = a.generate(text)
    wait_stored(cluster["a"], stored + 6)
    for _ in range(2):
        b.flush()
        again = b.generate(text)
        assert (again["storage"], again["tokens"]) == (6 * PAGE, first["tokens"])
    other = en_model.write(tmp_path / "other", seed=en_model.SEED + 1)
    assert b.update_weights(other)
    stored = cluster["b"].announced() // 2
    changed = b.generate(text)
    assert (changed["storage"], changed["tokens"] != first["tokens"]) == (0, True)
    wait_stored(cluster["b"], stored + 6)
    b.flush()
    own = b.generate(text)  # what it stored with these weights
    assert (own["storage"], own["tokens"]) == (6 * PAGE, changed["tokens"])
    a.flush()
    untouched = a.generate(text)
    assert (untouched["storage"], untouched["tokens"]) == (6 * PAGE, first["tokens"])
    assert b.update_weights(tiny_model, flush_cache=False)
    b.flush()
    back = b.generate(text)
    assert (back["storage"], back["tokens"]) == (0, first["tokens"])
