"""vLLM's tiering manager with PoolTier below it, without an engine. Run with the Python and path of some vLLM version.

    python tiering_process.py SOCKET put|get|idle [SALT]

`put` hands four chunks to the pool, `get` loads them in a process that never computed them, `idle` does, too, but has
no step of the scheduler while they load. With SALT the request's context is made by vLLM's own scheduler. Answers are
lines of JSON that start with `@@`. What stands between this and an engine, the copies on its device, is no part of the
pool.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import time
import types
from typing import Any

CHUNKS = 4


def say(**answer: object) -> None:
    print("@@" + json.dumps(answer), flush=True)


def make(socket: str) -> tuple[Any, Any]:
    from vllm.v1.kv_offload import config
    from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

    tier = {
        "type": "PoolTier",
        "module_path": "kvpool.engines.vllm",
        "socket": socket,
        "deadlines": {"lookup_ms": 2000, "load_min_ms": 5000},
    }

    def build(kind: Any, **values: Any) -> Any:
        """With the fields that this version has."""
        return kind(**{f.name: values[f.name] for f in dataclasses.fields(kind) if f.name in values})

    sizes = dict.fromkeys(("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size", "data_parallel_size"), 1)
    ranks = {"rank": 0, "data_parallel_index": 0, "data_parallel_rank_local": None}
    made = build(
        config.OffloadingConfig,
        groups=(build(config.OffloadingGroupConfig, tokens_per_block=16, layer_names=("l0", "l1"), group_id=0),),
        worker_kv_bytes_per_block=8192,
        enable_kv_cache_events=True,
        extra_config={"cpu_bytes_to_use": 16 << 20, "secondary_tiers": [tier]},
        engine_id=f"tiering-{os.getpid()}",
        model=build(config.OffloadingModelConfig, name="m", dtype="bfloat16", max_model_len=4096),
        cache=build(config.OffloadingCacheConfig, tokens_per_hash=16, blocks_per_chunk=1),
        parallel=build(config.OffloadingParallelConfig, **sizes, **ranks, is_parallelism_agnostic=True),
        kv_cache_layout="LBHNC",
    )
    spec = TieringOffloadingSpec(made)
    return spec, spec.get_manager()


def salted(salt: str) -> Any:
    """The context of a request with a salt, as the scheduler makes it."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler

    request = types.SimpleNamespace(request_id="request", kv_transfer_params=None, kv_hints=None, cache_salt=salt)
    return scheduler._create_req_context(request)


def loaded_without_a_step(manager: Any, tier: Any, keys: list[Any], request: Any, step: Any) -> bool:
    """Ask until the load is submitted, then let no step happen. Called under the manager's lock, which is released."""
    deadline = time.monotonic() + 30
    while not manager._jobs:
        assert time.monotonic() < deadline, tier.stats()
        for key in keys:
            manager.lookup(key, request)
        manager.on_schedule_end(types.SimpleNamespace(new_req_ids=(), preempted_req_ids=()))
        time.sleep(0.02)
    while tier._jobs.pending and time.monotonic() < deadline:
        time.sleep(0.01)
    if not hasattr(manager, "lock"):
        return not manager._jobs
    manager.lock.release()
    try:
        until = time.monotonic() + 10
        while manager._jobs and time.monotonic() < until:
            time.sleep(0.005)
        return not manager._jobs
    finally:
        manager.lock.acquire()


def main(socket: str, what: str, salt: str = "") -> None:
    import vllm
    from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key

    from kvpool.engines.vllm import interface

    _, manager = make(socket)
    keys = [make_offload_key(bytes([i]) * 32, 0) for i in range(CHUNKS)]
    request = salted(salt) if salt else ReqContext("request")
    tier = manager.secondary_tiers[0]
    deadline = time.monotonic() + 30
    while not tier.stats()["connected"] and time.monotonic() < deadline:
        time.sleep(0.05)
    view = manager.primary_tier.get_kv_memoryview().cast("B")
    size = len(view) // manager.primary_tier.get_kv_memoryview().shape[0]

    def step() -> None:
        manager.on_schedule_end(ScheduleEndContext([], []))
        time.sleep(0.05)

    def slots(of: Any) -> list[memoryview]:
        numbers = getattr(of, "chunk_ids", None)
        numbers = of.block_ids if numbers is None else numbers
        return [view[int(n) * size : (int(n) + 1) * size] for n in numbers]

    events: list[Any] = []
    found: list[str] = []
    bytes_seen: list[int] = []
    is_taken = False  # whether the manager took the load's result without a step
    with getattr(manager, "lock", contextlib.nullcontext()):  # 0.32 has none
        manager.on_new_request(request)
        if what == "put":
            out = manager.prepare_store(keys, request)
            for i, slot in enumerate(slots(out.store_spec)):
                slot[:] = bytes([65 + i]) * size
                slot.release()
            manager.complete_store(keys, request)
            while sum(len(e.keys) for e in events if e.medium.name == "STORAGE") < CHUNKS:
                assert time.monotonic() < deadline, tier.stats()
                step()
                events += manager.take_events()
        else:
            if what == "idle":
                is_taken = loaded_without_a_step(manager, tier, keys, request, step)
            while True:
                found = [manager.lookup(key, request).name for key in keys]
                if all(name in ("HIT", "MISS") for name in found) or time.monotonic() > deadline:
                    break
                step()
            if set(found) == {LookupResult.HIT.name}:
                for slot in slots(manager.prepare_load(keys, request)):
                    seen = set(slot)
                    bytes_seen.append(seen.pop() if len(seen) == 1 else -1)
                    slot.release()
                manager.complete_load(keys, request)
        manager.on_request_finished(request)
    say(
        problem=interface.interface_problem(),
        idle=is_taken,
        version=vllm.__version__,
        found=found,
        bytes=bytes_seen,
        fingerprint=tier.stats()["fingerprint"],
        localities=sorted({e.locality.name for e in events if e.medium.name == "STORAGE"}),
        stats=tier.stats()["client"],
    )
    view.release()
    manager.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
