"""Contenders take turns, round by round, so that whatever else the machine does hits them alike. Medians count."""

from __future__ import annotations

import functools
import statistics
import threading
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from bench import folios

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

_CPUCLOCK_SCHED = 2
_MIB = 1 << 20


@dataclass(frozen=True)
class Row:
    """One line of the table. `ratio_to_limit` is the median over the rounds: each round compares with its own limit.

    `cpu_ratio`: processor time of all the contender's processes over that of the limit's. `large_folios`: share of the
    contender's files in the page cache in folios of 64 KiB or more; None without files, or where the kernel hides it.
    """

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
    p20_ms: float = 0.0
    cpu_ratio: float = 0.0
    large_folios: float | None = None

    def as_json(self) -> dict[str, object]:
        return asdict(self)


@dataclass
class Contender:
    """`make(thread)` gives an operation; operation(n) moves the n-th batch. `pids`: whose processor time counts too.

    An operation that gives a number has measured its seconds itself, in a process of its own. `files`: what it reads.
    """

    system: str
    make: Callable[[int], Callable[[int], float | None]]
    pids: Sequence[int] = ()
    files: Sequence[Path] = ()


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
    share = functools.cache(folios.large_share_of)
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
                p20_ms=round(times[len(times) // 5] * 1e3, 4),
                cpu_ratio=round(cpu[i] / cpu[0], 3) if cpu[0] else 0.0,
                large_folios=share(tuple(contender.files)) if contender.files else None,
            )
        )  # fmt: skip
    return rows


def table(rows: Sequence[Row], asked_of: Callable[[Row], float | None], *, head: bool = True) -> str:
    """Format rows; `asked_of` is the target of a row's ratio, if it has one."""
    lines = [
        "path         block    batch  threads  system             GB/s    p20 ms    p50 ms    p99 ms"
        "  cpu s/GB  cpu/limit  of limit  target  folios",
        "-----------  -------  -----  -------  -------------  --------  --------  --------  --------"
        "  --------  ---------  --------  ------  ------",
    ]
    lines = lines if head else []
    for r in rows:
        asked = asked_of(r)
        size = f"{r.size // _MIB} MiB" if r.size >= _MIB else f"{r.size // 1024} KiB"
        lines.append(
            f"{r.path:11s}  {size:>7s}  {r.batch:5d}  {r.concurrency:7d}  {r.system:13s}  {r.gb_s:8.2f}  "
            f"{r.p20_ms:8.3f}  {r.p50_ms:8.2f}  {r.p99_ms:8.2f}  {r.cpu_s_per_gb:8.3f}  {r.cpu_ratio:9.2f}  "
            f"{r.ratio_to_limit:8.2f}  {f'{asked:.2f}' if asked else '':>6s}  "
            f"{'' if r.large_folios is None else f'{r.large_folios:.0%}':>6s}"
        )
    return "\n".join(lines)


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
    """Includes threads that have ended. 0 for a process that has ended."""
    try:
        return time.clock_gettime(~pid << 3 | _CPUCLOCK_SCHED)  # as clock_getcpuclockid(3) composes it
    except OSError:
        return 0.0
