"""Runs in an injected pod in an engine's place: stores and loads blocks when it is told to, and checks every call.

HTTP on the pod's own address. Blocks are named by number and their bytes follow from tenant and number, so two pods of
one tenant check each other's blocks, and a block of another tenant can never look right. Answers are JSON:

    POST /put {"first", "count"}            how many were stored, had, or refused for which reason
    POST /get {"first", "count"}            how many came from which tier, misses by reason, seconds of each call
    POST /lookup {"first", "count", "times"}  seconds of each lookup, and what was found
    POST /computed {"tokens", "seconds"}    what an engine's own prefill took, for the comparison with loads
    POST /problem {"text"}                  why an engine runs without the pool, as a plug-in reports it
    POST /traffic {"depth", "universe"}     so many requests at once from now on (0: none)
    GET  /report                            everything since the start: counts, what was broken (invariants I1 to I4)
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from kvpool.client import Client
from kvpool.engines.common.settings import client_config
from kvpool.engines.common.without_pool import report_without_pool
from kvpool.protocol import keys
from kvpool_testing.history import History
from kvpool_testing.stalls import Stalls
from kvpool_testing.traffic import Mix, Traffic, block_id_of, payload_of, payload_sum_of

PORT = 8000
MOST_BODY = 64 * 1024
MOST_BLOCKS = 4096


class Load:
    """One pod's client and what it saw."""

    def __init__(self, tenant: str, block_bytes: int, settings: dict[str, Any], stalls: Stalls) -> None:
        """`settings`: fingerprint `inputs` beside the usual ones, `model`, `tokens` of a block, `client` settings."""
        self._tenant, self._size = tenant, block_bytes
        inputs = {"model": "load", "block": block_bytes, **settings.get("inputs", {})}
        self._fingerprint = keys.fingerprint(inputs)
        self._sums: dict[bytes, bytes] = {}
        self._names: set[bytes] = set()
        self._history = History(stalls, expected=self._expected)
        client = Client(
            client_config(settings.get("client", {})),
            fingerprint=self._fingerprint,
            labels={"engine": "load", "model": settings.get("model", "load")},
            fingerprint_inputs=inputs,
            tokens_per_block=int(settings.get("tokens", 0)),
        )
        self._plain, self._client = client, self._history.client(client, tenant)
        self._traffic: Traffic | None = None

    def _block_ids(self, asked: dict[str, Any]) -> list[bytes]:
        first, count = int(asked.get("first", 0)), int(asked["count"])
        if not 0 < count <= MOST_BLOCKS or not 0 <= first < 2**32:
            raise ValueError(f"1 to {MOST_BLOCKS} blocks")
        found = [block_id_of(self._fingerprint, n) for n in range(first, first + count)]
        self._names.update(found)
        return found

    def _expected(self, whose: str, block_id: bytes) -> bytes | None:
        if block_id not in self._names:
            return None
        if block_id not in self._sums:
            self._sums[block_id] = payload_sum_of(whose, block_id, self._size)
        return self._sums[block_id]

    def put(self, asked: dict[str, Any]) -> dict[str, Any]:
        outcome: Counter[str] = Counter()
        for block_id in self._block_ids(asked):
            (result,) = self._client.put_from([block_id], [payload_of(self._tenant, block_id, self._size)])
            outcome["stored" if result.stored else "have" if result.ok else result.reason] += 1
        return {"outcome": dict(outcome), "ok": outcome["stored"] + outcome["have"]}

    def get(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Looks each block up and loads it, as an engine does; a block that is not found is not asked for."""
        outcome: Counter[str] = Counter()
        seconds, view = [], memoryview(bytearray(self._size))
        for block_id in self._block_ids(asked):
            started = time.monotonic()
            (tier,) = self._client.lookup([block_id])
            if not tier:
                outcome["absent"] += 1
            else:
                (result,) = self._client.get_into([block_id], [view])
                outcome[result.tier.name.lower() if result.ok else result.reason] += 1
            seconds.append(time.monotonic() - started)
        hits = sum(outcome[t] for t in ("local", "peer", "shared"))
        return {"outcome": dict(outcome), "hits": hits, "seconds": seconds}

    def lookup(self, asked: dict[str, Any]) -> dict[str, Any]:
        block_ids, outcome, seconds = self._block_ids(asked), Counter(), []
        for _ in range(min(int(asked.get("times", 1)), 2000)):
            started = time.monotonic()
            tiers = self._client.lookup(block_ids)
            seconds.append(time.monotonic() - started)
            outcome.update(t.name.lower() for t in tiers)
        return {"outcome": dict(outcome), "seconds": seconds}

    def computed(self, asked: dict[str, Any]) -> dict[str, Any]:
        self._plain.count_computed(int(asked["tokens"]), float(asked["seconds"]))
        return dict(self._plain.break_even.status())

    def problem(self, asked: dict[str, Any]) -> dict[str, Any]:
        self._plain.close()
        report_without_pool(str(asked["text"]), "load")
        return {}

    def traffic(self, asked: dict[str, Any]) -> dict[str, Any]:
        depth, universe = int(asked["depth"]), int(asked.get("universe", 200))
        if not 0 <= depth <= 64 or not 0 < universe <= MOST_BLOCKS:
            raise ValueError(f"at most 64 requests at once over {MOST_BLOCKS} blocks")
        self._names.update(block_id_of(self._fingerprint, n) for n in range(universe))
        if self._traffic is None:
            pause = float(asked.get("pause_s", 0.2))
            mix = Mix(self._size, universe, 8, float(asked.get("reads", 0.92)), pause_s=pause, prefill_s=pause)
            self._traffic = Traffic(self._client, self._fingerprint, mix, seed=1)
        self._traffic.resize(depth)
        return {"depth": depth}

    def report(self) -> dict[str, Any]:
        return {
            "connected": self._plain.connected,
            "counts": dict(self._history.counts),
            "broken": [list(b) for b in self._history.broken[:20]],
            "worst_late_s": round(self._history.latest_s, 3),
        }


def serve(load: Load, address: str) -> None:
    orders = {
        "/put": load.put,
        "/get": load.get,
        "/lookup": load.lookup,
        "/computed": load.computed,
        "/problem": load.problem,
        "/traffic": load.traffic,
    }

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(200, load.report())

        def do_POST(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            if self.path not in orders or not 0 < length <= MOST_BODY:
                return self._answer(404, {"error": "unknown"})
            try:
                return self._answer(200, orders[self.path](json.loads(self.rfile.read(length))))
            except (ValueError, KeyError, TypeError) as e:
                return self._answer(400, {"error": str(e)})

        def _answer(self, status: int, told: dict[str, Any]) -> None:
            body = json.dumps(told).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer((address, PORT), Handler)
    server.daemon_threads = True
    server.serve_forever()


if __name__ == "__main__":
    with Stalls() as stalls:
        settings = json.loads(os.environ.get("LOAD_SETTINGS") or "{}")
        load = Load(os.environ["LOAD_TENANT"], int(os.environ["LOAD_BLOCK_BYTES"]), settings, stalls)
        serve(load, os.environ["POD_IP"])
