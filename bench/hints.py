"""`python -m bench hints`: what session hints are worth on a trace, with some of them wrong.

The tables and traces are those of `bench trace`. A request belongs to the session whose last full block, of any of its
requests, it contains. At its end the session reports what it knows: that it has ended, or that it continues in about T
(its real pause, rounded up to 15 s, 1, 5, 15 minutes or 1 hour). A share of the hints is wrong: ended instead of
continued, or continued after a pause of another session. `half`: half of the sessions hint. `blanket`: every session
asks to retain its blocks for 5 minutes. Prints a table and writes out/bench/hints.json.
"""

from __future__ import annotations

import argparse
import bisect
import json
import os
import random
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

from bench.trace import BLOCK, NEAR, Request, facts, make, optimum, read, replay
from kvpool.protocol.hint import HintKind
from kvpool_sidecar.eviction import Entry, create_policy
from kvpool_sidecar.eviction.session_marks import SessionHint

CAPACITIES = (1_000, 5_000, 10_000, 20_000)  # blocks: 0.5, 2.6, 5.1 and 10.2 M tokens
MODES = ("none", "ended", "keep", "both", "half", "blanket")
_PAUSES = (15.0, 60.0, 300.0, 900.0, 3600.0)
_BLANKET_S = 300.0


class Turn(NamedTuple):
    """One request of a session. `pause`: seconds until the next one, rounded up; 0: there is none."""

    session: bytes
    pause: float


def sessions(requests: list[Request]) -> list[Turn]:
    """Attribute each request to a session, and find the session's next request."""
    last_block: dict[bytes, int] = {}  # of the session's latest request
    numbers: list[int] = []
    upcoming: dict[int, int] = {}
    pauses = [0.0] * len(requests)
    for n, request in enumerate(requests):
        full = request.keys[1 : request.tokens // BLOCK]  # all prompts of a trace may have the first block in common
        session = next((last_block[key] for key in reversed(full) if key in last_block), n)
        if (before := upcoming.get(session)) is not None:
            gap = request.at - requests[before].at
            pauses[before] = _PAUSES[min(bisect.bisect_left(_PAUSES, gap), len(_PAUSES) - 1)]
        upcoming[session] = n
        numbers.append(session)
        if full:
            last_block[full[-1]] = session
    return [Turn(n.to_bytes(16, "little"), pause) for n, pause in zip(numbers, pauses, strict=True)]


def hints(turns: list[Turn], mode: str, wrong: float, seed: int) -> list[tuple[HintKind, float] | None]:
    """The hint after each request; None: nothing is reported."""
    rng = random.Random(seed)
    real = [turn.pause for turn in turns if turn.pause] or [60.0]
    speaks = {turn.session: mode != "half" or rng.random() < 0.5 for turn in turns}
    found: list[tuple[HintKind, float] | None] = []
    for turn in turns:
        pause, is_wrong, other = turn.pause, rng.random() < wrong, rng.choice(real)
        if is_wrong:
            pause = 0.0 if pause else other
        if mode == "blanket":
            found.append((HintKind.TTL, _BLANKET_S))
        elif mode == "none" or not speaks[turn.session]:
            found.append(None)
        elif pause:
            found.append((HintKind.TURN if mode == "ended" else HintKind.KEEP, pause))
        else:
            found.append((HintKind.TURN if mode == "keep" else HintKind.ENDED, 0.0))
    return found


def replay_hints(
    requests: list[Request], turns: list[Turn], said: list[tuple[HintKind, float] | None], capacity: int
) -> tuple[float, float]:
    """Token hit rate in percent, and the share of expectations that the table saw come true."""
    table = create_policy("PrefixAware", capacity * BLOCK)
    entry = Entry(BLOCK, BLOCK, 0.0)
    hits = 0
    for (tokens, keys, at), turn, hint in zip(requests, turns, said, strict=True):
        found = next((n for n, key in enumerate(keys) if key not in table), len(keys))
        hits += min(found * BLOCK, tokens)
        table.observe_sequence(keys)
        for key in keys:
            if not table.touch(key, 0.0) and key not in table:
                table.add(key, entry)
        if len(table) > capacity:
            table.pop_victims(0, len(keys), at_least=len(table) - capacity)
        if hint is not None:
            kind, seconds = hint
            table.hint(SessionHint(kind, turn.session, seconds, at), keys)
    marks = table.marks
    return 100 * hits / sum(r.tokens for r in requests), marks.truth if marks else 0.0


_requests: list[Request] = []
_turns: list[Turn] = []


def _start(path: str, seed: int) -> None:
    _requests[:] = read(Path(path)) if path else make(seed)
    _turns[:] = sessions(_requests)


def _one(job: tuple[str, float, int, int]) -> tuple[float, float]:
    mode, wrong, capacity, seed = job
    if mode == "optimum":
        return optimum(_requests, capacity), 0.0
    if mode == "LRU":
        return replay(_requests, "LRU", capacity).percent, 0.0
    return replay_hints(_requests, _turns, hints(_turns, mode, wrong, seed), capacity)


def main(argv: list[str]) -> int:
    """Measure; 1 if hints are worth less than no hints, or retention by all sessions costs over 0.2 points."""
    parser = argparse.ArgumentParser(prog="bench hints", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--trace", default=os.environ.get("KVPOOL_TRACE", ""), help="trace file, as of bench trace")
    parser.add_argument("--synthetic", action="store_true", help="generate a synthetic trace even if one is configured")
    parser.add_argument("--seed", type=int, default=1, help="seed of the synthetic trace and of wrong hints")
    parser.add_argument("--wrong", type=float, nargs="+", default=[0.0, 0.1], help="shares of hints that are wrong")
    parser.add_argument("--capacities", type=int, nargs="+", default=CAPACITIES, help="in blocks of 512 tokens")
    parser.add_argument("--processes", type=int, default=min(4, os.cpu_count() or 1))
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    options = parser.parse_args(argv)
    path = "" if options.synthetic else options.trace or (str(NEAR) if NEAR.exists() else "")
    _start(path, options.seed)
    began = time.monotonic()
    jobs = [
        (mode, wrong, capacity, options.seed)
        for capacity in options.capacities
        for mode in ("LRU", "optimum", *MODES)
        for wrong in ([0.0] if mode in ("LRU", "optimum", "none", "blanket") else options.wrong)
    ]
    with ProcessPoolExecutor(options.processes, initializer=_start, initargs=(path, options.seed)) as pool:
        done = dict(zip(jobs, pool.map(_one, jobs), strict=True))
    rows = []
    for (mode, wrong, capacity, seed), (rate, truth) in done.items():
        lru, best = (done[one, 0.0, capacity, seed][0] for one in ("LRU", "optimum"))
        rows.append(
            {
                "mode": mode,
                "wrong": wrong,
                "capacity_blocks": capacity,
                "capacity_tokens": capacity * BLOCK,
                "token_hit_percent": round(rate, 3),
                "gap_closed": round((rate - lru) / (best - lru), 3) if best - lru > 0.01 else None,
                "truth": round(truth, 3),
            }
        )
    report = {
        "trace": "given" if path else "made",
        "statistics": facts(_requests),
        "sessions": len({turn.session for turn in _turns}),
        "continued": round(sum(turn.pause > 0 for turn in _turns) / len(_turns), 3),
        "rows": rows,
        "seconds": round(time.monotonic() - began, 1),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "hints.json").write_text(json.dumps(report, indent=1) + "\n")
    print(f"trace: {report['trace']}; sessions {report['sessions']}; continued requests {report['continued']}")
    print("M tokens  mode      wrong    hit %  gap closed  truth")
    for row in rows:
        print(
            f"{row['capacity_tokens'] / 1e6:8.1f}  {row['mode']:8s}  {row['wrong']:5.2f}  "
            f"{row['token_hit_percent']:7.2f}  {'-' if row['gap_closed'] is None else row['gap_closed']:>10}  "
            f"{row['truth']:5.2f}"
        )
    bad = [
        c
        for c in options.capacities
        if done["blanket", 0.0, c, options.seed][0] < done["none", 0.0, c, options.seed][0] - 0.2
    ]
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
