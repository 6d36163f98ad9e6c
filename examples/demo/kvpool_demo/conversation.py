"""What the users say: the project's own documents, cut into a shared system prompt, long openings and short follow-ups.

Pure. Text becomes tokens one byte at a time (e2e/engine/model.py: token = byte + 3), so lengths in bytes are lengths in
tokens, and no tokenizer is needed. A conversation's prompt in round r is everything said so far, the answers included.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["Conversation", "Shape", "conversations", "documents", "to_tokens"]

FIRST_BYTE = 3


@dataclass(frozen=True)
class Shape:
    """How many users talk how long. Lengths in bytes, which are tokens."""

    users: int = 4
    rounds: int = 5
    system: int = 1200
    opening: int = 2300
    follow_up: int = 320
    answer: int = 48

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with its answer, at most: roles and questions take up to 80 a round."""
        per_round = self.follow_up + self.answer + 80
        return self.system + self.opening + 80 + self.rounds * per_round


@dataclass(frozen=True)
class Conversation:
    """One user's part: the shared system prompt, then what the user says in each round."""

    system: str
    says: tuple[str, ...]

    def prompt(self, answers: Sequence[Sequence[int]]) -> list[int]:
        """The tokens of the next round's prompt, after `answers` to the rounds before."""
        tokens = to_tokens(self.system)
        for says, answer in zip(self.says, [*answers, ()], strict=False):
            tokens += to_tokens(says) + list(answer)
        return tokens


def to_tokens(text: str) -> list[int]:
    """One token per byte."""
    return [byte + FIRST_BYTE for byte in text.encode()]


def documents(root: Path) -> str:
    """The project's own pages, in one stable order."""
    pages = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    return "\n".join(page.read_text() for page in pages)


def conversations(text: str, shape: Shape) -> list[Conversation]:
    """One conversation per user. Each is about another part of `text`, which repeats if it is short."""
    system = f"system: You answer questions about this project.\n{_cut(text, 0, shape.system)}\n"
    each = shape.opening + (shape.rounds - 1) * shape.follow_up
    made = []
    for user in range(shape.users):
        at = shape.system + user * each
        says = [f"user {user}: I read this:\n{_cut(text, at, shape.opening)}\nWhat does it say?\nassistant:"]
        at += shape.opening
        for turn in range(1, shape.rounds):
            says.append(f"\nuser {user}: And this?\n{_cut(text, at, shape.follow_up)}\nQuestion {turn}.\nassistant:")
            at += shape.follow_up
        made.append(Conversation(system, tuple(says)))
    return made


def _cut(text: str, start: int, length: int) -> str:
    """`length` characters from `start` on, as if `text` went on forever; ASCII, so that a character is a byte."""
    if not text:
        raise ValueError("there is no text to talk about")
    start %= len(text)
    endless = text[start:] + text * (length // len(text) + 1)
    return endless[:length].encode("ascii", "replace").decode()
