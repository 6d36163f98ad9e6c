"""SGLang's real storage half on the CPU, obeying lines of JSON on its standard input. Run with the engine's Python.

SGLang's server copies pages with kernels of a GPU. Its cache controllers, host pools, storage factory and hashes need
none: here they are, with tensors in host memory and without the device's half. What a page must hold follows from its
key, so that another process can tell whether it got the right bytes.

Commands name a controller with "on": {"make": kind, "socket": path, ...}, {"store": tokens, "salt": text, "extra":
text}, {"fetch": tokens, ...}, {"flush": true}, {"clear": true}, {"detach": true}, {"stats": true}, {"quit": true}.
Answers are lines that start with `@@`.
"""

from __future__ import annotations

import array
import contextlib
import json
import queue
import sys
import threading
import time
import zlib
from types import SimpleNamespace

import torch
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache import device_pool_info as buffers
from sglang.srt.mem_cache import hicache_storage as hs
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.mem_cache.pool_host import base, group, mamba, mha, mla
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.runtime_context import get_parallel

LAYERS, HEADS, DIM, PAGE, TOKENS = 2, 2, 32, 64, 4096
STATES = 32
SECONDS = 60


def say(**answer: object) -> None:
    print("@@" + json.dumps(answer), flush=True)


def set_up() -> None:
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0
    get_parallel().override_permanently(attn_dcp_size=1)  # there is no server that would say so
    for module in (mha, mla):  # tables of device pointers, for copies that nobody makes here
        module._cuda = None
        module.make_kernel_ptr_table = lambda tensors, *_, **__: pointers(tensors)


def pointers(tensors: object) -> object:
    return torch.tensor([t.data_ptr() for t in tensors], dtype=torch.uint64)


def mha_pool(layout: str, dtype: object) -> object:
    k, v = (tuple(torch.zeros(TOKENS // 2, HEADS, DIM, dtype=dtype) for _ in range(LAYERS)) for _ in "kv")
    tensors = buffers.KVBuffers(
        k=k, v=v, k_data_ptrs=pointers(k), v_data_ptrs=pointers(v), layout=next(iter(buffers.KVBufferLayout))
    )
    info = buffers.MHABufferInfo(
        buffers=tensors, page_size=PAGE, head_num=HEADS, head_dim=DIM, v_head_dim=DIM, dtype=dtype,
        device=torch.device("cpu"),
    )  # fmt: skip
    return mha.MHATokenToKVPoolHost(
        info, host_to_device_ratio=2.0, host_size=0, page_size=PAGE, layout=layout, pin_memory=False, device="cpu",
        device_capacity_tokens=TOKENS // 2, start_layer=0, end_layer=LAYERS,
    )  # fmt: skip


def mla_pool(layout: str, dtype: object) -> object:
    rows = tuple(torch.zeros(TOKENS // 2, 1, 48, dtype=dtype) for _ in range(LAYERS))
    info = buffers.MLABufferInfo(
        buffers=rows, data_ptrs=pointers(rows), layer_indices=(0, 1), device_layer_num=LAYERS, page_size=PAGE,
        kv_lora_rank=32, qk_rope_head_dim=16, kv_cache_dim=48, dtype=dtype, device=torch.device("cpu"),
    )  # fmt: skip
    return mla.MLATokenToKVPoolHost(
        info, 2.0, 0, PAGE, layout, pin_memory=False, device="cpu", device_capacity_tokens=TOKENS // 2, start_layer=0,
        end_layer=LAYERS, target_layer_num=LAYERS,
    )  # fmt: skip


def state_pool(layout: str, dtype: object) -> object:
    info = buffers.MambaStateBufferInfo(
        temporal=torch.zeros(LAYERS, STATES, 4, 8, dtype=torch.float32),
        conv=(torch.zeros(LAYERS, STATES, 3, 8, dtype=dtype),),
    )
    return mamba.MambaPoolHost(info, 2.0, 0, device_capacity=STATES, pin_memory=False, device="cpu", layout=layout)


ALL = 1 << 30
SIDE_POOLS = {  # name, how many of the last pages a prefix needs, and the pool
    "mamba": (hs.PoolName.MAMBA, 1, state_pool),
    "swa": (hs.PoolName.SWA, 2, mha_pool),
    "draft": (hs.PoolName.DRAFT, ALL, mha_pool),  # at the same places as the KV
}


def storage_half(base: type) -> type:
    """A controller of SGLang's without its device half: the constructor is replaced, all else is as it was."""

    class StorageHalf(base):  # type: ignore[misc, valid-type]
        def __init__(self, pool: object, entries: object, config: dict[str, object]) -> None:
            self.tp_group = self.attn_cp_group = self.attn_tp_group = self.pp_group = None
            self.host_memory_mode = "cache"
            self.prefetch_hits_sync_groups = self.prefetch_completion_sync_groups = []
            self.storage_host_pool = pool
            self.mem_pool_host = group.HostPoolGroup(entries) if entries else pool
            self.mem_pool_device = SimpleNamespace()
            self.page_size = PAGE
            self.enable_storage = self.enable_storage_metrics = False
            self.storage_backend = self.storage_backend_type = self.host_write_staged_tokens_fn = None
            self.storage_stop_event = threading.Event()
            self.page_get_func, self.page_set_func = self._generic_page_get, self._generic_page_set
            self.pp_prefetch_command_group = self.pp_prefetch_command_thread = None
            self.pp_prefetch_state_lock = threading.Lock()
            self.pp_prefetch_states, self.pp_prefetch_decisions = {}, {}
            self.extra_host_mem_release_queues = {}
            self.write_queue, self.load_queue, self.ack_write_queue, self.ack_load_queue = [], [], [], []
            self.config = config

        def _generate_storage_config(self, model_name: object = None, storage_backend_extra_config: object = None):
            ranks = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1}
            page_first = self.storage_host_pool.layout == "page_first"
            return hs.HiCacheStorageConfig(
                **{**ranks, "is_mla_model": False, **self.config}, enable_storage_metrics=False,
                is_page_first_layout=page_first, model_name=model_name, extra_config=storage_backend_extra_config,
            )  # fmt: skip

        def _create_sync_groups(self):
            return []  # one rank: nobody to agree with

    return StorageHalf


class Controller:
    def __init__(self, kind: str, socket: str, **options: object) -> None:
        dtype = getattr(torch, str(options.pop("dtype", "bfloat16")))
        layout = str(options.pop("layout", "page_first"))
        model = options.pop("model", "tiny")
        ranks = options.pop("ranks", {})
        zero_copy = options.pop("zero_copy", True)
        self.hybrid = kind in SIDE_POOLS
        self.pool = (mla_pool if kind == "mla" else mha_pool)(layout, dtype)
        entries = None
        if self.hybrid:
            self.side_name, self.window, make = SIDE_POOLS[kind]
            self.side = make(layout, dtype)
            entries = [
                group.PoolEntry(hs.PoolName.KV, self.pool, None, lambda n: n, is_primary_index_anchor=True),
                group.PoolEntry(self.side_name, self.side, None, lambda n: n),
            ]
        base = HybridCacheController if self.hybrid else HiCacheController
        self.controller = storage_half(base)(self.pool, entries, {"is_mla_model": kind == "mla", **ranks})
        extra = {"backend_name": "kvpool", "module_path": "kvpool.engines.sglang", "class_name": "PoolHiCache"}
        extra.update({"interface_v1": 1} if zero_copy else {}, socket=socket, **options)
        arguments = {"prefetch_threshold": PAGE, "model_name": model, "storage_backend_extra_config": extra}
        if entries:
            arguments["host_pools"] = entries
        self.controller.attach_storage_backend("dynamic", **arguments)

    def transfer(self, places: object, keys: list[str]) -> object:
        """What SGLang's tree asks the controller for, of the side pool."""
        if self.window == ALL:
            return hs.PoolTransfer(self.side_name, indices_from_pool=hs.PoolName.KV)
        trailing = hs.PoolHitPolicy.TRAILING_PAGES
        return hs.PoolTransfer(self.side_name, host_indices=places, keys=keys, hit_policy=trailing)

    def key(self, tokens: list[int], extra: str | None, salt: str | None):
        return RadixKey(array.array("q", tokens), extra_key=extra, cache_salt=salt)

    def pages(self, indices: object) -> list[object]:
        """The host pool's own copy of each page."""
        return [self.pool.get_data_page(int(start)).clone() for start in indices[::PAGE]]

    def content(self, key: str, like: object) -> object:
        generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
        return torch.randn(like.shape, generator=generator).to(like.dtype)

    def store(self, tokens: list[int], extra: str | None = None, salt: str | None = None) -> dict[str, object]:
        key = self.key(tokens, extra, salt)
        hashes = get_storage_hash_str(key, None, page_size=PAGE)[: len(tokens) // PAGE]
        indices = self.pool.alloc(len(hashes) * PAGE)
        for name, start in zip(hashes, indices[::PAGE], strict=True):
            like = self.pool.get_dummy_flat_data_page()
            self.pool.set_from_flat_data_page(int(start), self.content(name, like))
        extras = {}
        if self.hybrid:
            covered = hashes[-self.window :]
            places = self.side.alloc(len(covered) * self.side.page_size) if self.window < ALL else indices
            for name, start in zip(covered, places[:: self.side.page_size], strict=True):
                like = self.side.get_dummy_flat_data_page()
                self.side.set_from_flat_data_page(int(start), side_content(name, like))
            extras = {"extra_pools": [self.transfer(places, covered)]}
        self.controller.write_storage(indices, key, hash_value=hashes, **extras)
        began = time.monotonic()
        done = self.controller.ack_backup_queue.get(timeout=SECONDS)
        self.pool.free(indices)
        if self.hybrid and self.window < ALL:
            self.side.free(places)
        backend = self.controller.storage_backend
        block_ids = (
            backend._transfer.pages["kv"].block_ids(backend._client, hashes) if backend._client is not None else []
        )
        return {
            "stored": done.completed_tokens,
            "seconds": time.monotonic() - began,
            "block_ids": [block_id.hex() for block_id in block_ids],
            "keys": hashes,
        }

    def fetch(self, tokens: list[int], extra: str | None = None, salt: str | None = None) -> dict[str, object]:
        key = self.key(tokens, extra, salt)
        self.pool.kv_buffer.zero_()
        began = time.monotonic()
        if self.hybrid:
            for buffer in self.side.get_hybrid_pool_buffer():
                buffer.zero_()
            wanted = min(self.window, len(tokens) // PAGE)
            places = self.side.alloc(wanted * self.side.page_size) if self.window < ALL else None
            transfer = self.transfer(places, ["?"] * wanted)
            self.controller.prefetch(CacheRequestHandle("r", 0), key, None, extra_pools=[transfer])
        else:
            self.controller.prefetch("r", key, None)
        operation = self.controller.prefetch_hit_queue.get(timeout=SECONDS)
        hit = operation.storage_hit_count
        answer = {"hit": hit, "asked": time.monotonic() - began}
        completed = 0
        if hit:
            operation.host_indices = self.pool.alloc(hit)
            self.controller.prefetch_buffer.put(operation)
            while True:
                ack = self.controller.ack_prefetch_queue.get(timeout=SECONDS)
                completed = max(completed, ack.completed_tokens or 0)
                if ack.completed_req:
                    break
            found = self.pages(operation.host_indices)[: completed // PAGE]
            answer["equal"] = all(
                torch.equal(page, self.content(name, page))
                for name, page in zip(operation.hash_value, found, strict=False)
            )
            if self.hybrid:
                starts = (transfer.host_indices if self.window < ALL else operation.host_indices)[
                    :: self.side.page_size
                ]
                sides = [self.side.get_data_page(int(start)).clone() for start in starts]
                names = operation.hash_value[-self.window :]
                answer["side"] = len(sides)
                answer["side_equal"] = len(sides) == len(names) and all(
                    torch.equal(page, side_content(name, page)) for name, page in zip(names, sides, strict=True)
                )
            self.pool.free(operation.host_indices)
        if self.hybrid and self.window < ALL:
            self.side.free(places)
        answer["completed"] = completed
        return {**answer, "seconds": time.monotonic() - began}

    def flush(self) -> dict[str, object]:
        """What SGLang's tree does at /flush_cache."""
        self.controller.reset()
        self.controller.mem_pool_host.clear()
        return {"flushed": True}

    def stats(self) -> dict[str, object]:
        backend = self.controller.storage_backend
        metrics = backend.get_stats()
        return {**backend.stats(), "metrics": {"loaded": metrics.prefetch_pgs, "stored": metrics.backup_pgs}}


def side_content(key: str, like: object) -> object:
    """Of a page of a side pool: small whole numbers, which every dtype in it can hold."""
    generator = torch.Generator().manual_seed(zlib.crc32(b"side" + key.encode()))
    return torch.randint(0, 100, like.shape, generator=generator, dtype=torch.uint8).to(like.dtype)


def main() -> None:
    set_up()
    say(ready=True)
    controllers: dict[str, Controller] = {}
    for line in sys.stdin:
        command = json.loads(line)
        if command.pop("quit", False):
            break
        name = command.pop("on", "")
        try:
            answer: dict[str, object] = {}
            if "make" in command:
                controllers[name] = Controller(command.pop("make"), **command)
            elif "store" in command:
                answer = controllers[name].store(command.pop("store"), **command)
            elif "fetch" in command:
                answer = controllers[name].fetch(command.pop("fetch"), **command)
            elif "flush" in command:
                answer = controllers[name].flush()
            elif "clear" in command:
                controllers[name].controller.storage_backend.clear()
            elif "detach" in command:
                controllers.pop(name).controller.detach_storage_backend()
            elif "stats" in command:
                answer = controllers[name].stats()
            say(**answer)
        except queue.Empty:
            say(error="the controller did not answer")
        except Exception as e:
            say(error=f"{type(e).__name__}: {e}")
            raise
    for controller in controllers.values():
        with contextlib.suppress(RuntimeError):
            controller.controller.detach_storage_backend()


if __name__ == "__main__":
    main()
