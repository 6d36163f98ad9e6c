"""Which node serves which round: never the node of the user's last round. Pure."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Visit", "schedule"]


@dataclass(frozen=True)
class Visit:
    """One round of one user, on one node."""

    user: int
    round: int
    node: int


def schedule(users: int, rounds: int, nodes: int, *, lost: bool = False) -> tuple[list[Visit], int | None]:
    """All visits in the order they are made, round by round, and the node that is lost before the last round.

    Round r of user u is on node (u + r) % nodes. With `lost`, one node is gone in the last round, the one that served
    user 0 in the round before: who would go there goes to the next node that did not serve the user's last round.
    ValueError where that is impossible (fewer than two nodes; with `lost` fewer than three nodes or two rounds).
    """
    if nodes < (3 if lost else 2) or (lost and rounds < 2):
        raise ValueError(f"{users} users cannot move in every round with {nodes} nodes and {rounds} rounds")
    gone = (rounds - 2) % nodes if lost else None
    visits = []
    for turn in range(rounds):
        for user in range(users):
            node = (user + turn) % nodes
            if turn == rounds - 1:
                before = (user + turn - 1) % nodes
                while node in (gone, before):
                    node = (node + 1) % nodes
            visits.append(Visit(user, turn, node))
    return visits, gone
