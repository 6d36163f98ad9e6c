"""One run of the KV cache benchmark of MLPerf Storage over the pool, in a process of its own.

    python mlperf_worker.py SETTINGS [options of the benchmark]

SETTINGS: JSON with `source` (folder of the benchmark), `write` and `read` (sockets of the nodes), `block_bytes`,
`counts` (file for the client's counters). The benchmark's `NVMeBackend` is replaced by blocks of the pool; an entry is
a run of blocks, written on one node and read on the same or the other one.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from kvpool.client import Client
from kvpool.config import ClientConfig
from kvpool.protocol import keys

__all__ = ["PoolBackend", "main"]

_WITHIN_S = 60.0  # the benchmark's own backend has no deadline


class PoolBackend:
    """Entries of the benchmark as blocks of the pool. The interface is `kv_cache.backends.StorageBackend`."""

    def __init__(self, settings: dict[str, Any], timing: Any) -> None:
        fingerprint = keys.fingerprint({"model": "mlperf"})
        labels = {"engine": "mlperf", "model": "mlperf"}
        self._fingerprint = fingerprint
        self._block_bytes = int(settings["block_bytes"])
        self._timing = timing
        sockets = dict.fromkeys((settings["write"], settings["read"]))
        clients = {
            path: Client(ClientConfig(socket=path, max_inflight_stores=4096), fingerprint=fingerprint, labels=labels)
            for path in sockets
        }
        self._clients = list(clients.values())
        self._writer, self._reader = clients[settings["write"]], clients[settings["read"]]
        self._shapes: dict[str, tuple[tuple[int, ...], str]] = {}
        for client in self._clients:
            if not client.wait_connected(30):
                raise SystemExit("bench: no sidecar answers")

    def write(self, key: str, data: Any) -> Any:
        """Store an array; what the pool refuses is missing when it is read. Returns the benchmark's timing."""
        began = time.perf_counter()
        flat: Any = np.ascontiguousarray(data).view(np.uint8).reshape(-1)
        views = self._split(memoryview(flat))
        self._writer.put_from(self._block_ids(key, len(views)), views, time.monotonic() + _WITHIN_S)
        self._shapes[key] = (data.shape, data.dtype.str)
        return self._took(began)

    def read(self, key: str) -> tuple[Any, Any]:
        """Load an array. KeyError if a block of it is missing, as the benchmark expects."""
        if key not in self._shapes:
            raise KeyError(key)
        began = time.perf_counter()
        shape, dtype = self._shapes[key]
        data: Any = np.empty(shape, dtype)
        views = self._split(memoryview(data.view(np.uint8).reshape(-1)))
        results = self._reader.get_into(self._block_ids(key, len(views)), views, time.monotonic() + _WITHIN_S)
        if not all(result.ok for result in results):
            raise KeyError(key)
        return data, self._took(began)

    def delete(self, key: str) -> None:
        """Forget an entry; the pool evicts its blocks when it wants the space."""
        self._shapes.pop(key, None)

    def clear(self) -> None:
        self._shapes.clear()

    def counts(self) -> dict[str, dict[str, int]]:
        """Totals of all clients (kvpool.client.Client.stats), those of reads."""
        return self._reader.stats()

    def close(self) -> None:
        for client in self._clients:
            client.close()

    def _split(self, data: memoryview) -> list[memoryview]:
        return [data[at : at + self._block_bytes] for at in range(0, len(data), self._block_bytes)]

    def _block_ids(self, key: str, count: int) -> list[bytes]:
        return [keys.block_id(self._fingerprint, f"{key}/{n}".encode()) for n in range(count)]

    def _took(self, began: float) -> Any:
        seconds = time.perf_counter() - began
        return self._timing(total=seconds, device=seconds, host=0.0)


def main(argv: list[str]) -> None:
    """Run the benchmark with its arguments, and write the client's counters."""
    settings: dict[str, Any] = json.loads(argv[0])
    sys.path.insert(0, settings["source"])
    cache: Any = importlib.import_module("kv_cache.cache")
    made: list[PoolBackend] = []

    def backend(base_path: str | None = None) -> PoolBackend:
        made.append(PoolBackend(settings, cache.StorageBackend.IOTiming))
        return made[-1]

    cache.NVMeBackend = backend
    sys.argv = ["kv-cache.py", *argv[1:]]
    try:
        importlib.import_module("kv_cache.cli").main()
    finally:
        Path(settings["counts"]).write_text(json.dumps([one.counts() for one in made]))
        for one in made:
            one.close()


if __name__ == "__main__":
    main(sys.argv[1:])
