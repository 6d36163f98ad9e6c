"""The turns as a CSV in the columns of LMBenchmark's multi-round QA, so that its plots and scripts read them.

Source: LMCache/LMBenchmark, real-multi-round-qa/multi-round-qa.py (`UserSession.summary`, written without an index).
Seconds; times since the epoch; users and questions count from 1.
"""

from __future__ import annotations

import csv
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from bench.sessions.figures import Asked

__all__ = ["COLUMNS", "rows", "write"]

COLUMNS = (
    "prompt_tokens", "generation_tokens", "ttft", "generation_time", "user_id", "question_id", "launch_time",
    "finish_time",
)  # fmt: skip


def rows(turns: Sequence[Asked]) -> list[tuple[int | float, ...]]:
    """One for each turn that was answered, by user and question, as LMBenchmark writes them."""
    answered = sorted((t for t in turns if not t.error), key=lambda t: (t.turn.user, t.turn.round))
    return [
        (
            t.prompt_tokens,
            t.answer_tokens,
            round(t.ttft, 6),
            round(t.finished - t.launched - t.ttft, 6),
            t.turn.user + 1,
            t.turn.round + 1,
            round(t.launched, 6),
            round(t.finished, 6),
        )
        for t in answered
    ]


def write(turns: Sequence[Asked], file: Path) -> None:
    with file.open("w", newline="") as out:
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(rows(turns))
