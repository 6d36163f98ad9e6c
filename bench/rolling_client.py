"""One engine's part in `python -m bench rolling`: a script that knows the client and nothing else, so that the client
of another release can run it.

`python rolling_client.py JSON`: stores its third of the blocks, then asks for prompts until its parent is gone, and
writes a line of JSON for each fifth of a second: `[unix time, blocks asked, blocks had, of them from the second set,
asked of the second set, wrong, failed, late]`. When the file `second` is there it stores its third of a second set.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

from kvpool import config
from kvpool.client import Client
from kvpool.protocol import block, keys

PROMPT = 6
_TICK_S = 0.2
_PAUSE_S = 0.03
_LATE_S = 1.0  # beyond its deadline, which a busy machine may take


def block_id(fingerprint: bytes, n: int) -> bytes:
    return keys.block_id(fingerprint, n.to_bytes(4, "little"))


def payload(name: bytes, size: int) -> bytes:
    return hashlib.shake_128(name).digest(size)


def engine_blocks(client: Any, numbers: list[int]) -> dict[str, Any]:
    """Identities of the blocks in their engine, as arguments of `put_from`; none for a client that is too old."""
    if not getattr(client, "wants_engine_blocks", False):
        return {}
    return {"engine_blocks": [block.EngineBlock(n.to_bytes(4, "little")) for n in numbers]}


def store(client: Any, asked: dict[str, Any], numbers: list[int]) -> None:
    fingerprint, size = bytes.fromhex(asked["fingerprint"]), int(asked["block_bytes"])
    for start in range(0, len(numbers), 8):
        some = numbers[start : start + 8]
        block_ids = [block_id(fingerprint, n) for n in some]
        end = time.monotonic() + 60
        while True:
            results = client.put_from(block_ids, [payload(i, size) for i in block_ids], **engine_blocks(client, some))
            if all(result.ok for result in results):
                break
            if time.monotonic() > end:
                raise RuntimeError(f"cannot store: {[result.reason for result in results]}")
            time.sleep(0.2)


def main(asked: dict[str, Any]) -> None:
    fingerprint, size = bytes.fromhex(asked["fingerprint"]), int(asked["block_bytes"])
    count, own, of = int(asked["blocks"]), int(asked["own"]), int(asked["of"])
    deadlines = config.Deadlines(lookup_ms=500, load_min_ms=2000)
    client = Client(config.ClientConfig(socket=asked["socket"], deadlines=deadlines), fingerprint=fingerprint)
    client.wait_connected(60)
    store(client, asked, [n for n in range(count) if n % of == own])
    Path(asked["done"]).write_text("")
    parent, rng = os.getppid(), random.Random(own)
    universe, buffers = count, [bytearray(size) for _ in range(PROMPT)]
    expected: dict[bytes, bytes] = {}
    tick, row = time.time(), [0, 0, 0, 0, 0, 0, 0]
    with open(asked["results"], "a", buffering=1) as output:
        while os.getppid() == parent:
            if universe == count and Path(asked["second"]).exists():
                store(client, asked, [n for n in range(count, 2 * count) if n % of == own])
                universe = 2 * count
                Path(asked["done"] + "-second").write_text("")
            first = rng.randrange(universe - PROMPT)
            numbers = range(first, first + PROMPT)
            block_ids = [block_id(fingerprint, n) for n in numbers]
            began = time.monotonic()
            try:
                results = client.get_into(block_ids, buffers)
            except Exception:
                row[5] += 1
                results = []
            row[6] += time.monotonic() - began > 2.0 + _LATE_S
            for n, name, result, buffer in zip(numbers, block_ids, results, buffers, strict=False):
                second = n >= count
                row[0] += 1
                row[3] += second
                if not result.ok:
                    continue
                row[1] += 1
                row[2] += second
                if name not in expected:
                    expected[name] = hashlib.sha256(payload(name, size)).digest()
                row[4] += hashlib.sha256(buffer).digest() != expected[name]
            if time.time() - tick > _TICK_S:
                output.write(json.dumps([time.time(), *row]) + "\n")
                tick, row = time.time(), [0] * 7
            time.sleep(_PAUSE_S)
    client.close()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
