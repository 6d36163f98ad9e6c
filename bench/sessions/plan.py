"""Who asks when, and which node answers. Pure: the same seed gives the same plan."""

from __future__ import annotations

import random
from dataclasses import dataclass

__all__ = ["Turn", "plan"]


@dataclass(frozen=True)
class Turn:
    """One question of one user. `at` is in seconds after the start of the run; rounds and users count from 0."""

    user: int
    round: int
    node: int
    at: float


def plan(users: int, rounds: int, nodes: int, qps: float, routing: str, seed: int = 0) -> list[Turn]:
    """All turns in the order in which they are due.

    Questions come evenly at `qps` a second, users in turn, so each user asks every users / qps seconds (as in
    LMBenchmark). sticky: a user stays on one node; random: any node; migrating: never the node of the turn before.
    ValueError if there is nowhere to move to.
    """
    if routing == "migrating" and nodes < 2:
        raise ValueError("sessions cannot migrate on one node")
    chance = random.Random(seed)
    turns = []
    for number in range(users * rounds):
        turn, user = divmod(number, users)
        if routing == "sticky":
            node = user % nodes
        elif routing == "random":
            node = chance.randrange(nodes)
        else:
            node = (user + turn) % nodes
        turns.append(Turn(user, turn, node, number / qps))
    return turns
