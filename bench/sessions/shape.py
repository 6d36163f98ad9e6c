"""What is played: how many users talk how long, how fast, by which routes; and the presets. Pure."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PRESETS", "ROUTINGS", "Shape"]

ROUTINGS = ("sticky", "random", "migrating")


@dataclass(frozen=True)
class Shape:
    """Lengths in tokens. The shape of LMBenchmark's multi-round QA: see `docs/project/benchmarks.md`."""

    users: int
    rounds: int
    system: int  # the system prompt that all users share
    history: int  # what a user brings to the first question
    question: int
    answer: int
    qps: tuple[float, ...]  # sessions that migrate are played at each; other routings at the last
    routings: tuple[str, ...] = ROUTINGS
    pairs: int = 4  # conversations whose second turn is asked on either node
    prefix: int = 4096  # tokens of their first turn
    overhead: int = 10  # pairs of prompts that nobody has seen, with and without the pool
    limit_s: int = 600

    def __post_init__(self) -> None:
        counts = (self.users, self.rounds, self.system, self.history, self.question, self.answer, self.limit_s)
        if min(counts) < 1 or min(self.pairs, self.prefix, self.overhead) < 0 or not self.qps or min(self.qps) <= 0:
            raise ValueError("users, rounds, lengths and QPS must be above 0")
        if unknown := set(self.routings) - set(ROUTINGS):
            raise ValueError(f"no routing {', '.join(sorted(unknown))}: there are {', '.join(ROUTINGS)}")

    @property
    def longest(self) -> int:
        """Tokens of the longest session, its last answer included."""
        return self.system + self.history + self.rounds * (self.question + self.answer)

    @property
    def longest_pair(self) -> int:
        """Tokens of a conversation of two turns, with both answers."""
        return self.prefix + self.question + 2 * self.answer if self.pairs else 0

    def plays(self) -> list[tuple[str, float]]:
        """Routing and QPS of each run: migrating at each QPS, then the others at the last."""
        made = [("migrating", qps) for qps in self.qps if "migrating" in self.routings]
        return made + [(routing, self.qps[-1]) for routing in self.routings if routing != "migrating"]


PRESETS = {
    "try": Shape(2, 2, 128, 640, 64, 8, (1.0,), ("migrating",), pairs=1, prefix=1024, overhead=1, limit_s=300),
    "small": Shape(5, 3, 256, 1280, 64, 16, (0.6, 1.2), overhead=6),
    "full": Shape(
        80, 10, 1000, 12_000, 100, 150, (1, 2, 3, 4, 5, 6, 7), pairs=20, prefix=16_384, overhead=40, limit_s=6 * 3600
    ),
}
