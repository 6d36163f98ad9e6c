"""One system in a process of its own, with its own libraries: stores and reads blocks when told to, and times itself.

Run as a file in the peers' environment; nothing of the project is imported here. Commands come as lines of JSON on
standard input, answers go out as lines of JSON on the descriptor that was standard output (libraries may print).

    {"do": "store", "size": bytes, "count": n}      {"do": "open", "size": bytes, "batch": n}
    {"do": "read", "first": n, "batch": n}          {"do": "write", "n": n}        each answered by {"s": seconds}
"""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import sys
import threading
import time
from typing import Any

_PAGE = 4096


def pattern(n: int) -> bytes:
    return n.to_bytes(8, "little") * 512


def buffer(size: int) -> memoryview:
    memory = mmap.mmap(-1, max(size, 2 << 20))
    memory.madvise(mmap.MADV_HUGEPAGE)
    view = memoryview(memory)[:size]
    for offset in range(0, size, _PAGE):
        view[offset] = 1
    return view


class System:
    """`open` comes first; `read` gives the blocks' bytes, for a look at them outside the measurement."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.size = 0
        self.batch = 0

    def open(self, size: int, batch: int) -> None:
        self.size, self.batch = size, batch
        memory = buffer(size * batch)
        self.memory = memory
        self.views = [memory[i * size : (i + 1) * size] for i in range(batch)]

    def store(self, n: int, data: memoryview) -> None:
        raise NotImplementedError

    def read(self, first: int) -> None:
        raise NotImplementedError

    def got(self, at: int) -> memoryview:
        """The bytes of the block that was read last at this place of the batch."""
        return self.views[at]

    def forget(self, n: int) -> None:
        """Remove a block that was written for a measurement, so that it takes no room."""
        raise NotImplementedError

    def close(self) -> None:
        pass


class Redis(System):
    """redis-py with hiredis: MGET, and a copy into the engine's buffer, because it gives new bytes objects."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import redis

        super().__init__(settings)
        self.client = redis.Redis(settings["host"], settings["port"])

    def store(self, n: int, data: memoryview) -> None:
        self.client.set(f"{self.size}/{n}", data)

    def forget(self, n: int) -> None:
        self.client.delete(f"{self.size}/{n}")

    def read(self, first: int) -> None:
        values = self.client.mget([f"{self.size}/{n}" for n in range(first, first + self.batch)])
        for view, value in zip(self.views, values, strict=True):
            view[:] = value  # type: ignore[assignment]


class VllmFs(System):
    """vLLM's tier `fs`: its thread pool of 16 and 16, its batch functions, O_DIRECT where the file system has it."""

    def __init__(self, settings: dict[str, Any]) -> None:
        from vllm.v1.kv_offload.tiering.fs import io
        from vllm.v1.kv_offload.tiering.fs.thread_pool import DualQueueThreadPool

        super().__init__(settings)
        self.io = io
        self.pool = DualQueueThreadPool(16, 16, thread_name_prefix="vllm_kv_py_fs")
        os.makedirs(settings["directory"], exist_ok=True)
        self.direct = io.probe_o_direct(settings["directory"])
        self.jobs = 0

    def _path(self, n: int) -> str:
        name = f"{self.size:08x}{n:056x}"
        return f"{self.settings['directory']}/{name[-3:]}/{name[-5:-3]}/{name}.bin"

    def _run(self, enqueue: Any, task: Any) -> None:
        self.jobs += 1
        enqueue(self.jobs, 1, [task])
        while True:
            for _, ok, _ in self.pool.get_finished():
                if not ok:
                    raise RuntimeError("a job failed")
                return
            time.sleep(0.00005)  # an engine asks once a step, which is longer

    def store(self, n: int, data: memoryview) -> None:
        path = self._path(n)
        self._run(self.pool.enqueue_store, lambda: self.io.batch_store_block([path], data, [0], self.size, self.direct))

    def forget(self, n: int) -> None:
        os.unlink(self._path(n))

    def read(self, first: int) -> None:
        paths = [self._path(n) for n in range(first, first + self.batch)]
        offsets = [i * self.size for i in range(self.batch)]
        self._run(
            self.pool.enqueue_load,
            lambda: self.io.batch_load_block(paths, self.memory, offsets, self.size, self.direct),
        )

    def close(self) -> None:
        self.pool.shutdown()


class Lmcache(System):
    """A remote connector of LMCache, with an LMCache memory pool as the engine's buffer."""

    def open(self, size: int, batch: int) -> None:
        import torch
        from lmcache.utils import CacheEngineKey
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.metadata import LMCacheMetadata
        from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

        self.size, self.batch = size, batch
        tokens = 256
        # a shape of 32 layers whose 256 tokens take `size` bytes in bf16
        width = size // (32 * 2 * tokens * 2)
        layers = 32
        if width == 0:
            layers, width = 1, size // (2 * tokens * 2)
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=tokens,
            local_cpu=False,
            max_local_cpu_size=max(0.1, 3 * size * batch / 2**30),
            extra_config={"save_chunk_meta": True},
        )
        metadata = LMCacheMetadata(
            model_name="bench", world_size=1, local_world_size=1, worker_id=0, local_worker_id=0,
            kv_dtype=torch.bfloat16, kv_shape=(layers, 2, tokens, 1, width), chunk_size=tokens,
        )  # fmt: skip
        self.dtype, self.key_class = torch.bfloat16, CacheEngineKey
        if not hasattr(self, "loop"):
            self.loop = asyncio.new_event_loop()
            threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self._let_go()
        self.backend = LocalCPUBackend(config, metadata, "cpu")
        self.connector = self.connect(config)

    def _let_go(self) -> None:
        """Give back the memory of the shape before this one."""
        for held in getattr(self, "objects", ()):
            held.ref_count_down()
        self.objects: list[Any] = []
        if hasattr(self, "backend"):
            self.backend.memory_allocator.close()

    def connect(self, config: Any) -> Any:
        raise NotImplementedError

    def _key(self, n: int) -> Any:
        return self.key_class("bench", 1, 0, self.size << 32 | n, self.dtype)

    def _wait(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(60)

    def store(self, n: int, data: memoryview) -> None:
        c = self.connector
        held = self.backend.allocate(c.meta_shapes, c.meta_dtypes, c.meta_fmt)
        memoryview(held.byte_array).cast("B")[:] = data
        self._wait(c.put(self._key(n), held))
        held.ref_count_down()

    def read(self, first: int) -> None:
        for held in self.objects:
            held.ref_count_down()
        self.objects = []
        keys = [self._key(n) for n in range(first, first + self.batch)]
        self.objects = self._wait(self._get(keys))

    async def _get(self, keys: list[Any]) -> list[Any]:
        if self.connector.support_batched_get():
            return list(await self.connector.batched_get(keys))
        return list(await asyncio.gather(*(self.connector.get(key) for key in keys)))

    def got(self, at: int) -> memoryview:
        return memoryview(self.objects[at].byte_array).cast("B")


class LmcacheFs(Lmcache):
    def connect(self, config: Any) -> Any:
        from lmcache.v1.storage_backend.connector.fs_connector import FSConnector

        return FSConnector(self.loop, self.backend, config, base_paths_str=self.settings["directory"])

    def forget(self, n: int) -> None:
        self.connector.remove_sync(self._key(n))


class LmcacheRedis(Lmcache):
    def connect(self, config: Any) -> Any:
        from lmcache.v1.storage_backend.connector.redis_connector import RedisConnector

        url = f"redis://{self.settings['host']}:{self.settings['port']}"
        return RedisConnector(url, self.loop, self.backend)


class LmcacheResp(Lmcache):
    def connect(self, config: Any) -> Any:
        from lmcache.v1.storage_backend.connector.redis_connector import RESPConnector

        return RESPConnector(self.settings["host"], self.settings["port"], self.loop, self.backend)


class Mooncake(System):
    """The store over TCP. `segment` bytes of this process's memory are given to the store."""

    def __init__(self, settings: dict[str, Any]) -> None:
        from mooncake.store import MooncakeDistributedStore

        super().__init__(settings)
        self.at = 0
        self.mooncake = MooncakeDistributedStore()
        master = f"{settings['host']}:{settings['port']}"
        code = self.mooncake.setup(
            settings["address"], "P2PHANDSHAKE", settings["segment"], 512 << 20, "tcp", "", master
        )
        if code != 0:
            raise RuntimeError(f"setup: {code}")

    def open(self, size: int, batch: int) -> None:
        import ctypes

        if self.at:
            self.mooncake.unregister_buffer(self.at)
        super().open(size, batch)
        self.at = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        code = self.mooncake.register_buffer(self.at, size * batch)
        if code != 0:
            raise RuntimeError(f"register_buffer: {code}")

    def store(self, n: int, data: memoryview) -> None:
        code = self.mooncake.put(f"{self.size}/{n}", data)
        if code != 0:
            raise RuntimeError(f"put: {code}")

    def read(self, first: int) -> None:
        keys = [f"{self.size}/{n}" for n in range(first, first + self.batch)]
        places = [self.at + i * self.size for i in range(self.batch)]
        got = self.mooncake.batch_get_into(keys, places, [self.size] * self.batch)
        if got != [self.size] * self.batch:
            raise RuntimeError(f"batch_get_into: {got[:4]}")


SYSTEMS = {
    "redis": Redis,
    "vllm-fs": VllmFs,
    "lmcache-fs": LmcacheFs,
    "lmcache-redis": LmcacheRedis,
    "lmcache-resp": LmcacheResp,
    "mooncake-tcp": Mooncake,
}


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    system = SYSTEMS[sys.argv[1]](json.loads(sys.argv[2]))
    print(json.dumps({"s": 0}), file=out, flush=True)
    data = memoryview(b"")
    for line in sys.stdin:
        command = json.loads(line)
        what = command["do"]
        seconds = 0.0
        if what == "open":
            system.open(command["size"], command["batch"])
            data = buffer(command["size"])
        elif what == "store":
            for n in range(command["count"]):
                data[:] = pattern(n) * (command["size"] // _PAGE)
                system.store(n, data)
        elif what == "write":
            began = time.perf_counter()
            system.store(command["n"], data)
            seconds = time.perf_counter() - began
            system.forget(command["n"])
        elif what == "read":
            first = command["first"]
            began = time.perf_counter()
            system.read(first)
            seconds = time.perf_counter() - began
            for at in (0, system.batch - 1):
                view = system.got(at)
                if view[:_PAGE] != pattern(first + at) or view[-_PAGE:] != pattern(first + at):
                    raise RuntimeError(f"block {first + at} came back with other bytes")
        print(json.dumps({"s": seconds}), file=out, flush=True)
    system.close()
    out.flush()
    os._exit(0)  # some libraries keep threads that nobody ends


if __name__ == "__main__":
    main()
