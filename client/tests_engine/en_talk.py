"""Conversations as lists of tokens: who says what, on which node, and what must be in the pool afterwards."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

BLOCK = 32  # tokens, see engine_process.py
ROUNDS = 3
ANSWER = 24  # tokens


@dataclass
class Talk:
    """One conversation. Even numbers are greedy, odd ones sampled with a seed of their own."""

    number: int
    history: list[int]
    answers: list[list[int]] = field(default_factory=list)

    def request(self, question: Sequence[int], salt: str = "") -> dict[str, Any]:
        self.history += question
        wish: dict[str, Any] = {"prompt": list(self.history), "max_tokens": ANSWER, "salt": salt}
        return wish if self.number % 2 == 0 else {**wish, "seed": 1000 + self.number}

    def hear(self, answer: list[int]) -> None:
        self.answers.append(answer)
        self.history += answer


def words(seed: int, count: int) -> list[int]:
    """`count` tokens that depend on `seed` alone."""
    source = random.Random(seed)
    return [source.randrange(3, 503) for _ in range(count)]


def openings(count: int) -> list[Talk]:
    """Three shared beginnings, one of them shorter than a block; four conversations in a row branch from one text."""
    lengths = (3 * BLOCK + 5, 2 * BLOCK, 20)
    return [Talk(i, words(i % 3, lengths[i % 3]) + words(100 + i // 4, 41)) for i in range(count)]


def question(number: int, turn: int) -> list[int]:
    """Conversations that branch say the same at first and part at the second turn."""
    return words(200 + number // 4 if turn == 0 else 1000 * turn + number, 30 + 7 * (number % 6))


def full_blocks(tokens: Sequence[int]) -> set[tuple[int, ...]]:
    """The prefixes of whole blocks: what vLLM hands to the pool of a text whose last token was not computed yet."""
    return {tuple(tokens[:end]) for end in range(BLOCK, len(tokens), BLOCK)}
