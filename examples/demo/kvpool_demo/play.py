"""Plays a conversation: each visit asks one node for one round."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from kvpool_demo.statistics import Turn

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvpool_demo.conversation import Conversation
    from kvpool_demo.routing import Visit

__all__ = ["Answer", "Ask", "play"]


class Answer(NamedTuple):
    """What a node gave for a prompt."""

    wait_ms: float
    cached: int
    tiers: dict[str, int]
    tokens: tuple[int, ...]


class Ask(Protocol):
    def __call__(self, visit: Visit, prompt: list[int], /) -> Answer: ...


def play(
    visits: Sequence[Visit],
    talks: Sequence[Conversation],
    ask: Ask,
    *,
    history: Sequence[Turn] = (),
    before_round: Callable[[int], None] = lambda _: None,
    on_turn: Callable[[Turn], None] = lambda _: None,
) -> list[Turn]:
    """All turns. Prompts hold the answers given before: this run's own, or those of `history` where it is given.

    With another run's answers every round has that run's prompt, so that each is a comparison of its own.
    """
    given = {(t.visit.user, t.visit.round): t.tokens for t in history}
    turns: list[Turn] = []
    for i, visit in enumerate(visits):
        if i and visits[i - 1].round != visit.round:
            before_round(visit.round)
        answers = [given[visit.user, r] for r in range(visit.round)]
        prompt = talks[visit.user].prompt(answers)
        answer = ask(visit, prompt)
        turn = Turn(visit, len(prompt), answer.cached, answer.tiers, answer.wait_ms, answer.tokens)
        given.setdefault((visit.user, visit.round), answer.tokens)
        turns.append(turn)
        on_turn(turn)
    return turns
