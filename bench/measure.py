"""Contenders take turns, round by round, so that whatever else the machine does hits them alike. Medians count."""

from __future__ import annotations

import os
import statistics
import threading
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@dataclass(frozen=True)
class Row:
    """One line of the table. `ratio_to_limit` is the median over the rounds: each round compares with its own limit."""

    path: str
    size: int
    concurrency: int
    batch: int
    system: str
    gb_s: float
    p50_ms: float
    p99_ms: float
    cpu_s_per_gb: float
    ratio_to_limit: float

    def as_json(self) -> dict[str, object]:
        return asdict(self)


@dataclass
class Contender:
    """`make(thread)` gives an operation; operation(n) moves the n-th batch. `pids`: whose processor time counts too.

    An operation that gives a number has measured its seconds itself, in a process of its own.
    """

    system: str
    make: Callable[[int], Callable[[int], float | None]]
    pids: Sequence[int] = ()


def compare(
    path: str, size: int, batch: int, concurrency: int, rounds: int, operations: int, contenders: Sequence[Contender]
) -> list[Row]:
    """The first contender is the limit. Each round, each contender does `operations` batches on each thread."""
    ready = [[c.make(t) for t in range(concurrency)] for c in contenders]
    seconds: list[list[float]] = [[] for _ in contenders]
    per_round: list[list[float]] = [[] for _ in contenders]  # bytes per second
    cpu = [0.0] * len(contenders)
    for operation in (op for ops in ready for op in ops):
        for n in range(operations):
            operation(n)  # warms the page cache, the buffers and the connections
    for number in range(rounds):
        order = range(len(contenders)) if number % 2 == 0 else reversed(range(len(contenders)))
        for i in order:
            before = _cpu(contenders[i].pids)
            wall, times = _run(ready[i], operations)
            cpu[i] += _cpu(contenders[i].pids) - before
            seconds[i] += times
            if concurrency == 1:  # by the median operation: a hiccup of the machine is not the contender's
                per_round[i].append(size * batch / statistics.median(times))
            else:
                per_round[i].append(size * batch * concurrency * operations / wall)
    total_gb = size * batch * concurrency * operations * rounds / 1e9
    rows = []
    for i, contender in enumerate(contenders):
        ratios = [mine / limit for mine, limit in zip(per_round[i], per_round[0], strict=True)]
        times = sorted(seconds[i])
        rows.append(
            Row(
                path, size, concurrency, batch, contender.system,
                gb_s=round(statistics.median(per_round[i]) / 1e9, 3),
                p50_ms=round(statistics.median(times) * 1e3, 3),
                p99_ms=round(times[min(len(times) - 1, int(len(times) * 0.99))] * 1e3, 3),
                cpu_s_per_gb=round(cpu[i] / total_gb, 4),
                ratio_to_limit=round(statistics.median(ratios), 3),
            )
        )  # fmt: skip
    return rows


def _run(operations: Sequence[Callable[[int], float | None]], count: int) -> tuple[float, list[float]]:
    times: list[float] = []

    def loop(operation: Callable[[int], float | None]) -> None:
        mine = []
        for n in range(count):
            began = time.perf_counter()
            measured = operation(n)
            mine.append(time.perf_counter() - began if measured is None else measured)
        times.extend(mine)

    began = time.perf_counter()
    if len(operations) == 1:
        loop(operations[0])
    else:
        threads = [threading.Thread(target=loop, args=(operation,)) for operation in operations]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return time.perf_counter() - began, times


def _cpu(pids: Sequence[int]) -> float:
    """Seconds of processor time of this process and of `pids`."""
    return time.process_time() + sum(_cpu_of(pid) for pid in pids)


def _cpu_of(pid: int) -> float:
    total = 0
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/schedstat") as file:
                total += int(file.read().split()[0])
    except (OSError, ValueError, IndexError):
        return 0.0
    return total / 1e9
