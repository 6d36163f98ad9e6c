"""What is said. Words made from a seed: every run has conversations of its own, the same for each system. Pure."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.sessions.shape import Shape

__all__ = ["Session", "sessions", "to_tokens", "words"]

FIRST_BYTE = 3  # e2e/engine/model.py: token = byte + 3
_VOCABULARY = """
the a of to in and is it on for as at by or from that this with not are
be an was can has had will block prefix cache node tier token model engine memory drive page read write
load store route request answer question time long short first last next other same new old fast slow much many
some few each every where when which while
"""


class Session:
    """One user's side of a conversation: `says[round]`, after a system prompt that is the same for everybody."""

    def __init__(self, system: str, says: Sequence[str]) -> None:
        self.system = system
        self.says = tuple(says)

    def tokens(self, answers: Sequence[Sequence[int]]) -> list[int]:
        """The next prompt after `answers`, for a model whose tokens are bytes: one token for each character."""
        made = to_tokens(self.system)
        for says, answer in zip(self.says, [*answers, ()], strict=False):
            made += to_tokens(says) + list(answer)
        return made

    def messages(self, answers: Sequence[str]) -> list[dict[str, str]]:
        """The next prompt after `answers`, as messages of a chat."""
        made = [{"role": "system", "content": self.system}]
        for turn, says in enumerate(self.says[: len(answers) + 1]):
            made.append({"role": "user", "content": says})
            if turn < len(answers):
                made.append({"role": "assistant", "content": answers[turn]})
        return made


def to_tokens(text: str) -> list[int]:
    return [byte + FIRST_BYTE for byte in text.encode()]


def words(seed: str, length: int, *, in_bytes: bool) -> str:
    """`length` bytes, or `length` words: a common tokenizer takes about one token for each."""
    chance, vocabulary = random.Random(seed), _VOCABULARY.split()
    if not in_bytes:
        return " ".join(chance.choices(vocabulary, k=length))
    made = " ".join(chance.choices(vocabulary, k=length // 2 + 1))
    return made[:length]


def sessions(shape: Shape, run: str, *, in_bytes: bool) -> list[Session]:
    """One for each user. Two runs with different names share no text, so neither finds the other's blocks."""
    system = words(f"{run}/system", shape.system, in_bytes=in_bytes)
    made = []
    for user in range(shape.users):
        says = [words(f"{run}/{user}/history", shape.history, in_bytes=in_bytes)]
        says += [""] * (shape.rounds - 1)
        for turn in range(shape.rounds):
            asked = words(f"{run}/{user}/{turn}", shape.question, in_bytes=in_bytes)
            says[turn] = f"{says[turn]}{asked}" if in_bytes or not says[turn] else f"{says[turn]} {asked}"
        made.append(Session(system, says))
    return made
