"""One engine's part: a process with a client, so many requests at once, every call held against the promise.

`python -m bench.soak.client JSON`. Writes a line of JSON each second to its results file (replaced as a whole): counts,
latencies, violations, and what it holds. Commands come as a file, too: `{"depth": n, "stop": bool}`, so that killing or
stopping either side leaves nothing half said.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

from bench.soak.stops import Stops
from kvpool import config
from kvpool.client import Client
from kvpool_testing.history import ALLOWANCE_S, History
from kvpool_testing.residue import residue
from kvpool_testing.stalls import Stalls
from kvpool_testing.traffic import Mix, Traffic, block_id_of, payload_sum_of

_RESERVOIR = 4000
_RAMP = 40  # more threads a second: starting hundreds at once measures that and nothing else


class Latencies:
    """p50, p99 and the largest, of a sample of fixed size (reservoir sampling), and against the deadlines."""

    def __init__(self) -> None:
        self._sample: list[float] = []
        self._seen = 0
        self._max = 0.0
        self._worst = float("-inf")
        self._rng = random.Random(1)

    def add(self, seconds: float, late_s: float) -> None:
        self._seen += 1
        self._max = max(self._max, seconds)
        self._worst = max(self._worst, late_s)
        if len(self._sample) < _RESERVOIR:
            self._sample.append(seconds)
        elif (place := self._rng.randrange(self._seen)) < _RESERVOIR:
            self._sample[place] = seconds

    def summary(self) -> dict[str, float]:
        ordered = sorted(self._sample)
        if not ordered:
            return {}

        def at(share: float) -> float:
            return round(1000 * ordered[min(int(share * len(ordered)), len(ordered) - 1)], 3)

        return {
            "calls": self._seen,
            "p50_ms": at(0.5),
            "p99_ms": at(0.99),
            "max_ms": round(1000 * self._max, 3),
            "worst_over_deadline_ms": round(1000 * self._worst, 3),
        }


def run(asked: dict[str, Any]) -> int:
    """Until the commands file says stop, or its parent is gone."""
    tenant, size = str(asked["tenant"]), int(asked["block_bytes"])
    fingerprint = bytes.fromhex(asked["fingerprint"])
    commands, results = Path(asked["commands"]), Path(asked["results"])
    universe = int(asked["universe"])
    names = {block_id_of(fingerprint, n) for n in range(universe)}
    sums: dict[bytes, bytes] = {}

    def expected(whose: str, block_id: bytes) -> bytes | None:
        if block_id not in names:
            return None
        if block_id not in sums:
            sums[block_id] = payload_sum_of(whose, block_id, size)
        return sums[block_id]

    deadlines = config.Deadlines(**asked["deadlines"])
    settings = config.ClientConfig(socket=asked["socket"], connect_retry_ms=200, deadlines=deadlines)
    client = Client(settings, fingerprint=fingerprint, labels={"engine": "soak", "model": "soak"})
    latencies = {op: Latencies() for op in ("lookup", "load", "store")}
    parent = os.getppid()
    stops = Stops(commands.parent, str(asked["name"]))
    with Stalls() as stalls:
        history = History(stalls, expected=expected, stopped_s=stops.between)
        mix = Mix(size, universe, int(asked["prompt"]), pause_s=0.5, prefill_s=4.0)
        traffic = Traffic(history.client(client, tenant), fingerprint, mix, int(asked["seed"]))
        stopped, depth = False, 0
        while True:
            wanted = {"depth": 0, "stop": False}
            with contextlib.suppress(OSError, ValueError):
                wanted = json.loads(commands.read_text())
            if wanted["stop"] or os.getppid() != parent:
                stopped = traffic.stop(60)
                client.close()
            else:
                depth = min(int(wanted["depth"]), depth + _RAMP)
                traffic.resize(depth)
            while history.calls:
                call = history.calls.popleft()
                if not stops.between(call.started, call.ended):
                    latencies[call.op].add(call.ended - call.started, call.late_s)
            now = residue(os.getpid())
            _write(
                results,
                {
                    "pid": os.getpid(),
                    "stopped": stopped,
                    "ended": wanted["stop"],
                    "counts": dict(history.counts),
                    "latency": {op: found.summary() for op, found in latencies.items()},
                    "worst_stall_ms": round(1000 * stalls.worst_s, 1),
                    "allowance_ms": 1000 * ALLOWANCE_S,
                    "broken": [list(b) for b in history.broken[:50]],
                    "residue": now._asdict(),
                },
            )
            if wanted["stop"] or os.getppid() != parent:
                return 0
            time.sleep(1.0)


def _write(path: Path, value: dict[str, Any]) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(value))
    fresh.replace(path)


if __name__ == "__main__":
    logging.basicConfig(level=logging.ERROR)
    sys.exit(run(json.loads(sys.argv[1])))
