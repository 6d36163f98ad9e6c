"""Nodes that are drained, by hand: real sidecars that take orders, and what the tests ask of them."""

from __future__ import annotations

import os
import time

from sc_operator import ADMIN_PORT, Operator
from sc_raw import block_id, payload

from kvpool import config
from kvpool.errors import CorruptBlockError
from kvpool.protocol import wire

SIZE = 128 * 1024
FAST = 1 << 30


def nodes(cluster, names: str, *, shared: bool = False, cache: config.CacheConfig | None = None, index=True) -> list:
    """Real sidecars that take orders, and a real index."""
    made = cluster(shared=shared, index=index)
    cache = cache or config.CacheConfig(prefetch_bytes=0)
    return [made.node(name, cache=cache, admin_port=ADMIN_PORT) for name in names]


def selective(**kw) -> config.CacheConfig:
    """Nothing goes to the shared tier by itself."""
    return config.CacheConfig(
        warm_up_bytes_per_s=1, prefetch_bytes=0, write_policy="WriteThroughSelective", write_min_hits=1000, **kw
    )


def store(node, numbers, size: int = SIZE, tenant: str = "team-a") -> None:
    with node.connect(tenant) as raw:
        assert set(raw.put({block_id(n): payload(n, size) for n in numbers})) == {wire.CommitStatus.STORED}


def drain(node, bandwidth: int = FAST, **params) -> dict:
    return Operator.of(node).run(f"evacuate-{time.monotonic_ns()}", "evacuate", bandwidth=bandwidth, **params)


def remain(node) -> None:
    assert Operator.of(node).run(f"remain-{time.monotonic_ns()}", "remain")["state"] == "Succeeded"


def reported(node) -> dict:
    return node.status()["drain"]


def loads(node, numbers, size: int = SIZE, tenant: str = "team-a") -> list[int]:
    """Which of the blocks can be had there, whole; one that is not is told of, as clients do."""
    found = []
    for n in numbers:
        with node.connect(tenant) as raw:
            try:
                (data,) = raw.get([block_id(n)])
            except CorruptBlockError:
                raw.ask(wire.Op.REPORT, wire.pack_json({"corrupt": [block_id(n).hex()]}))
                continue
        assert data is None or data == payload(n, size)
        found += [n] if data is not None else []
    return found


def spoil(file) -> None:
    """Flip a bit of the payload."""
    file.chmod(0o600)
    with file.open("r+b") as f:
        f.seek(-1, os.SEEK_END)
        last = f.read(1)
        f.seek(-1, os.SEEK_END)
        f.write(bytes([last[0] ^ 1]))


def lookup(node, numbers) -> list[int]:
    with node.connect() as raw:
        return raw.lookup([block_id(n) for n in numbers], flags=wire.Flag.EXHAUSTIVE)
