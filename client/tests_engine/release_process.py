"""What the guards and probes do with the engine that is on the path. Run with the engine's Python; answers with JSON.

python release_process.py sglang MODEL
python release_process.py lmcache SOCKET
"""

from __future__ import annotations

import json
import sys


def sglang(model: str) -> dict[str, object]:
    import sglang.srt.mem_cache.pool_host.base as base
    import sglang.srt.server_args as server_args  # the start-up module's hook runs here
    from sglang.srt.arg_groups.overrides import resolving_view

    from kvpool.engines.sglang import guard, storage

    guard.DEVICES.add("cpu")
    guard.SPARE_BYTES = base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0
    reported: list[str] = []
    guard.report_without_pool = lambda problem, engine: reported.append(problem)

    def resolved(**more: object) -> list[object]:
        reported.clear()
        basic = {"model_path": model, "device": "cpu", "attention_backend": "torch_native", "skip_tokenizer_init": True}
        record = server_args.ServerArgs(**basic, **more)
        record.resolve_once()
        view = resolving_view(record)
        return [view.enable_hierarchical_cache, view.hicache_storage_backend, view.page_size, *reported]

    return {
        "version": storage.sglang.__version__,
        "problem": storage.interface_problem(),
        "plain": resolved(),
        "sized": resolved(hicache_size=1),
        "no cache": resolved(disable_radix_cache=True),
        "another storage": resolved(enable_hierarchical_cache=True, hicache_storage_backend="file"),
        # SGLang refuses a decode context that is split, with a storage that it does not know
        "refused": resolved(dcp_size=2, tp_size=2, hicache_size=1),
    }


def lmcache(socket: str) -> dict[str, object]:
    import lmcache
    from lmcache.v1.distributed import config  # the start-up module's hook runs here
    from lmcache.v1.distributed.l2_adapters import create_l2_adapter_from_registry as create

    from kvpool.engines.lmcache import l2_adapter, remote_connector

    basic = ["--l1-size-gb", "0.1", "--eviction-policy", "LRU", "--no-l1-use-lazy"]

    def adapters(*more: str) -> list[str]:
        found = config.parse_args_to_config(config.get_arg_parser().parse_args([*basic, *more])).l2_adapter_config
        return [getattr(adapter, "class_name", type(adapter).__name__) for adapter in found.adapters]

    parsed = config.parse_args_to_config(config.get_arg_parser().parse_args(basic))
    made = create(parsed.l2_adapter_config.adapters[0], None)
    healthy = made.report_status()["is_healthy"]
    made.close()
    return {
        "version": lmcache.__version__,
        "problems": [l2_adapter.interface_problem(), remote_connector.interface_problem()],
        "adapters": adapters(),
        "beside": adapters("--l2-adapter", json.dumps({"type": "mock", "max_size_gb": 1, "mock_bandwidth_gb": 10})),
        "policy": parsed.prefetch_policy,
        "healthy": healthy,
    }


if __name__ == "__main__":
    print("@@" + json.dumps({"sglang": sglang, "lmcache": lmcache}[sys.argv[1]](sys.argv[2])))
