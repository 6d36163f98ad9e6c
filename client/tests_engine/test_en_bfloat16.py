"""In bfloat16 an answer depends on how its prompt is split between what is computed and what is loaded.

So conversations that move are compared with the same ones that stay, whose engine finds the same blocks in its own
cache; one request at a time, for what is computed together matters, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cl_nodes import until
from en_engine import Engine, connector
from en_talk import BLOCK, ROUNDS, Talk, openings, question

if TYPE_CHECKING:
    from collections.abc import Callable

    from cl_nodes import Cluster

PATIENT = {"deadlines": {"lookup_ms": 1000, "load_min_ms": 4000}}


def test_conversations_that_move_say_what_they_say_where_they_stay(
    cluster: Cluster, start_engine: Callable[..., Engine]
) -> None:
    engines = [start_engine(connector(cluster[n].socket, **PATIENT), {"dtype": "bfloat16"}) for n in "ab"]

    def play(salt: str, engine_of: Callable[[Talk, int], Engine]) -> tuple[list[list[list[int]]], int]:
        """Answers by conversation and turn, and how many tokens came from another node."""
        before = sum(engine.stats()["tokens"].get("peer", 0) for engine in engines)
        talks = openings(6)
        for turn in range(ROUNDS):
            for talk in talks:
                engine = engine_of(talk, turn)
                talk.hear(engine.generate(**talk.request(question(talk.number, turn), salt))["tokens"])
                for node, each in zip("ab", engines, strict=True):
                    each.settle()
                    assert until(lambda node=node: cluster[node].announced() == len(cluster[node].block_files()))
        tokens = sum(engine.stats()["tokens"].get("peer", 0) for engine in engines)
        return [talk.answers for talk in talks], tokens - before

    stayed, none = play("stays", lambda talk, turn: engines[talk.number % 2])
    moved, peer = play("moves", lambda talk, turn: engines[(talk.number + turn) % 2])
    assert none < peer >= 6 * (ROUNDS - 1) * 2 * BLOCK
    assert moved == stayed
