"""`python -m bench trace`: how many tokens of a real day's prompts each order of eviction saves, by capacity.

The tables are those that the sidecar uses (kvpool_sidecar.eviction), for a node with --drives. Each request looks its
blocks up in order; the blocks before the first miss are hits; then all are there. `optimum` knows the future: it keeps
what is used soonest, and does not keep what is used never (Belady 1966, with bypass), on one drive. The blocks before a
block are used whenever it is, so they are used no later; with ties broken for the beginning the optimum keeps no block
without its prefix: no order can have more hits, even though only a prefix counts. (Exact in blocks.)

Trace: JSON lines of Mooncake's form (FAST25-release; `timestamp` ms, `input_length`, `hash_ids` of 512 tokens), by
--trace or KVPOOL_TRACE, else ../shared/traces/conversation_trace.jsonl. Where there is none, one is made with the same
statistics, and --workload makes one of another kind. Prints tables; writes out/bench/trace.json and trace.png.
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import random
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from bench.trace_file import BLOCK, Request, TraceError, key_of, read
from bench.trace_replay import Arrangement, optimum, replay
from bench.workloads import WORKLOADS
from kvpool_sidecar.eviction import POLICIES, Entry, create_policy

__all__ = ["BLOCK", "NEAR", "Request", "facts", "main", "make", "optimum", "read", "replay"]

CAPACITIES = (1_000, 2_000, 3_000, 5_000, 8_000, 10_000, 20_000, 30_000, 50_000)  # blocks: 0.5 M to 25.6 M tokens
DEFAULT = "PrefixAware"
TOLERANCE = 0.2  # percentage points that the default may be below LRU
NEAR = Path(__file__).resolve().parents[2] / "shared/traces/conversation_trace.jsonl"
PUBLISHED = {"requests": 12_031, "mean_input": 12_035, "unique_blocks": 182_790, "most_percent": 37.4}
_MAX_DRIVES = 64
_SPAN_S = 3537.0


def make(seed: int = 1) -> list[Request]:
    """A trace like the conversation trace: sessions that come evenly, go on with some chance, after a while."""
    rng = random.Random(seed)
    goes_on = (0.315, 0.42, 0.5, 0.58, 0.65)
    due: list[tuple[float, int, int, list[int]]] = [(rng.uniform(0, _SPAN_S), n, 0, [0]) for n in range(7_130)]
    heapq.heapify(due)
    fresh, number, requests = 1, len(due), []
    while due:
        when, _, turn, before = heapq.heappop(due)
        new = min(max(1, round(rng.lognormvariate(2.35, 1.22) if turn == 0 else rng.lognormvariate(1.05, 1.3))), 240)
        ids = before + list(range(fresh, fresh + new))
        fresh += new
        requests.append(Request(len(ids) * BLOCK - rng.randrange(BLOCK), [key_of(n) for n in ids], when))
        again = when + rng.lognormvariate(4.98, 1.0)
        if rng.random() < goes_on[min(turn, 4)] * 1.12 and again < _SPAN_S:
            number += 1
            kept = ids[:-1] if rng.random() < 0.73 else ids[: max(1, round(len(ids) * rng.random()))]
            heapq.heappush(due, (again, number, turn + 1, kept))
    return requests


def touch_costs(rounds: int = 9, count: int = 20_000) -> dict[str, float]:
    """Nanoseconds for one use of a block that is there, as a read pays it. Policies take turns; best round."""
    keys = [key_of(n) for n in range(count)]
    tables = {policy: create_policy(policy, count * BLOCK) for policy in POLICIES}
    for table in tables.values():
        for key in keys:
            table.add(key, Entry(BLOCK, BLOCK, 0.0))
    best = dict.fromkeys(POLICIES, float("inf"))
    shuffle = random.Random(1).shuffle
    for _ in range(rounds):
        shuffle(keys)
        for policy, table in tables.items():
            began = time.perf_counter_ns()
            for key in keys:
                table.touch(key, 0.0)
            best[policy] = min(best[policy], (time.perf_counter_ns() - began) / count)
    return best


def facts(requests: list[Request]) -> dict[str, float]:
    """The statistics by which traces are compared."""
    seen: set[bytes] = set()
    hits = 0
    for tokens, keys, _ in requests:
        found = next((n for n, key in enumerate(keys) if key not in seen), len(keys))
        hits += min(found * BLOCK, tokens)
        seen.update(keys)
    return {
        "requests": len(requests),
        "mean_input": round(statistics.fmean(r.tokens for r in requests)),
        "unique_blocks": len(seen),
        "most_percent": round(100 * hits / sum(r.tokens for r in requests), 1),
    }


_KINDS = {"chat": make, **WORKLOADS}
_requests: list[Request] = []
_arrangement: list[Arrangement] = []


def _start(path: str, workload: str, seed: int, arrangement: Arrangement) -> None:
    _requests[:] = read(Path(path)) if path else _KINDS[workload](seed)
    _arrangement[:] = [arrangement]


def _one(job: tuple[str, int]) -> tuple[str, int, float, float]:
    policy, capacity = job
    if policy == "optimum":
        return policy, capacity, optimum(_requests, capacity), 0.0
    return policy, capacity, *replay(_requests, policy, capacity, _arrangement[0])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench trace", description=__doc__.split("\n", 1)[0])
    parser.add_argument(
        "--trace", default=os.environ.get("KVPOOL_TRACE", ""), help="trace file (JSON lines); default: see above"
    )
    parser.add_argument("--synthetic", action="store_true", help="generate a synthetic trace even if one is configured")
    parser.add_argument("--workload", choices=sorted(_KINDS), default="chat", help="kind of the synthetic trace")
    parser.add_argument("--seed", type=int, default=1, help="seed of the synthetic trace")
    parser.add_argument(
        "--capacities", type=int, nargs="+", default=CAPACITIES, help="cache capacities in blocks of 512 tokens"
    )
    parser.add_argument("--drives", type=int, default=1, help="drives of equal size that share the capacity")
    parser.add_argument(
        "--watermarks", type=int, nargs=2, default=(100, 100), metavar=("HIGH", "LOW"),
        help="percent of the capacity: eviction begins above HIGH and goes on down to LOW",
    )  # fmt: skip
    parser.add_argument(
        "--uses-late", type=float, default=0.0, metavar="SECONDS", help="uses reach the tables this much later"
    )
    parser.add_argument(
        "--remember-fraction", type=float, default=0.0, metavar="SHARE",
        help="blocks whose uses the default policy remembers, as a share of the capacity; 0: as the product does",
    )  # fmt: skip
    parser.add_argument(
        "--untaught", action="store_true", help="lookups do not show the order of blocks, as after a restart"
    )
    parser.add_argument("--processes", type=int, default=min(4, os.cpu_count() or 1))
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    return parser


def _arranged(options: argparse.Namespace, parser: argparse.ArgumentParser) -> Arrangement:
    high, low = options.watermarks
    if not 0 < low <= high <= 100:
        parser.error("--watermarks: percentages, HIGH at least LOW")
    if not 1 <= options.drives <= _MAX_DRIVES:
        parser.error(f"--drives: 1 to {_MAX_DRIVES}")
    if min(options.capacities) < options.drives:
        parser.error("--capacities: at least one block for each drive")
    if not 0 <= options.uses_late < 86_400:
        parser.error("--uses-late: 0 seconds to a day")
    if not 0 <= options.remember_fraction <= 1000:
        parser.error("--remember-fraction: 0 to 1000")
    return Arrangement(options.drives, high, low, options.uses_late, not options.untaught, options.remember_fraction)


def main(argv: list[str]) -> int:
    """Measure; 1 if the default is more than TOLERANCE below LRU at a capacity, 2 if the trace cannot be read."""
    parser = _parser()
    options = parser.parse_args(argv)
    arrangement = _arranged(options, parser)
    is_made = options.synthetic or options.workload != "chat"
    path = "" if is_made else options.trace or (str(NEAR) if NEAR.exists() else "")
    try:
        _start(path, options.workload, options.seed, arrangement)
    except TraceError as e:
        print(f"bench trace: {e}", file=sys.stderr)
        return 2
    name = Path(path).stem if path else f"{options.workload}-{options.seed}"
    there = facts(_requests)
    print(
        f"trace: {name}, {arrangement.drives} drives; "
        + ", ".join(f"{k} {v} (published {PUBLISHED[k]})" for k, v in there.items())
    )
    jobs = [(policy, capacity) for capacity in options.capacities for policy in (*POLICIES, "optimum")]
    began = time.monotonic()
    start = (path, options.workload, options.seed, arrangement)
    with ProcessPoolExecutor(options.processes, initializer=_start, initargs=start) as pool:
        done = {(policy, capacity): (rate, ns) for policy, capacity, rate, ns in pool.map(_one, jobs)}
    rows = [
        {
            "trace": name,
            "drives": arrangement.drives,
            "policy": policy,
            "capacity_blocks": capacity,
            "capacity_tokens": capacity * BLOCK,
            "hit_rate": round(done[policy, capacity][0] / 100, 5),
            "token_hit_percent": round(done[policy, capacity][0], 3),
            "gap_closed": _closed(done, policy, capacity),
            "table_ns_per_access": round(done[policy, capacity][1]),
        }
        for policy, capacity in jobs
    ]
    costs = touch_costs()
    touch = {p: {"ns": round(ns), "ratio_to_lru": round(ns / costs["LRU"], 2)} for p, ns in costs.items()}
    behind = [c for c in options.capacities if done[DEFAULT, c][0] < done["LRU", c][0] - TOLERANCE]
    report = {
        "trace": name,
        "arrangement": arrangement._asdict(),
        "statistics": there,
        "published": PUBLISHED,
        "default": DEFAULT,
        "default_behind_lru_at": behind,
        "rows": rows,
        "touch": touch,
        "seconds": round(time.monotonic() - began, 1),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "trace.json").write_text(json.dumps(report, indent=1) + "\n")
    _print(done, list(options.capacities), touch)
    _draw(done, list(options.capacities), there["most_percent"], options.out / "trace.png")
    return 1 if behind else 0


def _closed(done: dict[tuple[str, int], tuple[float, float]], policy: str, capacity: int) -> float | None:
    """The share of LRU's gap to the optimum that a policy closes; None where there is no gap."""
    lru, best = done["LRU", capacity][0], done["optimum", capacity][0]
    return round((done[policy, capacity][0] - lru) / (best - lru), 3) if best - lru > 0.01 else None


def _print(
    done: dict[tuple[str, int], tuple[float, float]], capacities: list[int], touch: dict[str, dict[str, float]]
) -> None:
    columns = (*POLICIES, "optimum")
    print("\ntoken hit rate in percent\nM tokens " + "".join(f"{name:>13}" for name in columns) + "   gap closed")
    for c in capacities:
        rates = "".join(f"{done[name, c][0]:13.2f}" for name in columns)
        print(f"{c * BLOCK / 1e6:8.1f} {rates} {_closed(done, DEFAULT, c) or 0:12.3f}")
    print(
        "\none use of a block: " + ", ".join(f"{p} {t['ns']} ns ({t['ratio_to_lru']} of LRU)" for p, t in touch.items())
    )


def _draw(done: dict[tuple[str, int], tuple[float, float]], capacities: list[int], most: float, path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    looks = {
        "optimum": ("#222222", "--", 1.6), DEFAULT: ("#c0392b", "-", 2.8), "LRU": ("#2471a3", "-", 1.8),
        "S3FIFO": ("#27883f", "-", 1.4), "LFU": ("#b9770e", "-", 1.4), "FIFO": ("#8e6bb0", "-", 1.4),
    }  # fmt: skip
    tokens = [c * BLOCK / 1e6 for c in capacities]
    figure, axes = plt.subplots(figsize=(9, 5.4), dpi=130)
    for name, (color, style, width) in looks.items():
        rates = [done[name, c][0] for c in capacities]
        label = f"{name} (default)" if name == DEFAULT else name
        axes.plot(tokens, rates, style, color=color, linewidth=width, marker="o", markersize=3.5, label=label)
    lru, default = ([done[n, c][0] for c in capacities] for n in ("LRU", DEFAULT))
    axes.fill_between(tokens, lru, default, color="#c0392b", alpha=0.1)
    axes.axhline(most, color="#999999", linewidth=0.9, linestyle=":")
    axes.text(tokens[0], most + 0.4, f"no limit: {most:.1f} %", color="#666666", fontsize=9)
    axes.set_xscale("log")
    axes.set_xticks(tokens, [f"{t:.1f}" for t in tokens])
    axes.minorticks_off()
    axes.set_ylim(0, most + 3)
    axes.set_xlabel("capacity in million tokens (log scale)")
    axes.set_ylabel("token hit rate in %")
    axes.set_title("What each order of eviction saves", loc="left", fontsize=12, fontweight="bold")
    axes.grid(axis="y", color="#e4e4e4")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right", fontsize=9)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
