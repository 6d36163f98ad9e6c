"""What is seen while it runs: a line per request, and on a terminal a bar below that says how far it is."""

from __future__ import annotations

import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from kvpool_demo.statistics import TIERS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from kvpool_demo.statistics import Turn

__all__ = ["Display"]

PLAIN_WIDTH = 110
BUSY = 0.25  # of all cores
WATCH_S = 0.5


class Display:
    """Of one run of the demonstration."""

    def __init__(self, total: int) -> None:
        console = Console(highlight=False)
        # lines of a log or a pipe must not be broken at 80 columns
        self._console = console if console.is_terminal else Console(highlight=False, width=PLAIN_WIDTH)
        self._began = time.monotonic()
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:.0f} of {task.total:.0f} requests"),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task("starting", total=total)

    @contextmanager
    def running(self) -> Iterator[Display]:
        with self._progress:
            yield self

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def say(self, text: str) -> None:
        """One line of what is going on."""
        self._console.print(f"[{self.seconds:5.0f} s] {text}", markup=False, soft_wrap=True)

    def warn_if_busy(self) -> None:
        """Times mean little while others use the cores."""
        before = _cpu_ticks()
        time.sleep(WATCH_S)
        idle, total = (b - a for a, b in zip(before, _cpu_ticks(), strict=True))
        busy = 1 - idle / max(1, total)
        if busy > BUSY:
            self.say(f"note: others keep {busy:.0%} of this machine's cores busy; times will be longer and noisy")

    def phase(self, title: str) -> None:
        """A new part begins; what is before the colon stands beside the bar."""
        self._progress.update(self._task, description=title.partition(":")[0])
        self._console.print()
        self._console.print(f"[{self.seconds:5.0f} s] {title}", markup=False, style="bold", soft_wrap=True)

    def turn(self, turn: Turn, node: str, measured: str = "first token") -> None:
        """A request is done."""
        self._progress.advance(self._task)
        sources = [f"{turn.tiers[tier]:,} {tier}" for tier in TIERS if turn.tiers.get(tier)]
        loaded = sum(turn.tiers.values())
        own = max(0, turn.cached - loaded)
        sources += [f"{own:,} engine's own"] if own else []
        sources += [f"{turn.prompt - turn.cached:,} computed"]
        self._console.print(
            f"[{self.seconds:5.0f} s]   round {turn.visit.round + 1}  user {turn.visit.user}  {node}"
            f"  {turn.prompt:,} tokens: {', '.join(sources)}; {measured} after {turn.wait_ms:,.0f} ms",
            markup=False,
            soft_wrap=True,
        )

    def show(self, what: RenderableType) -> None:
        self._console.print()
        self._console.print(what)


def _cpu_ticks() -> tuple[int, int]:
    """Idle and all ticks of all cores so far (proc(5), /proc/stat: idle and iowait are the 4th and 5th number)."""
    ticks = [int(n) for n in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return ticks[3] + ticks[4], sum(ticks)
