"""What the client's start-up module makes of a server's arguments, one forked process per case.

    python server_case_process.py sglang MODEL_DIRECTORY
    python server_case_process.py lmcache

Run with the engine's Python. Reads lines of JSON: {"path": the client's folder, "sabotage": Python that runs before,
"variable": text of the variable}. Each is answered by a line that starts with `@@`: the arguments with which the server
would start, and the sentences that were reported.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Any

VARIABLES = {"sglang": "KVPOOL_SGLANG_HICACHE", "lmcache": "KVPOOL_LMCACHE_L2"}


def say(**answer: object) -> None:
    os.write(1, b"\n@@" + json.dumps(answer, default=str).encode() + b"\n")


def sglang(model: str) -> list[object]:
    import sglang.srt.server_args as server_args  # the hook runs here
    from sglang.srt.arg_groups.overrides import resolving_view

    if guard := sys.modules.get("kvpool.engines.sglang.guard"):
        guard.DEVICES.add("cpu")
    basic = {"model_path": model, "device": "cpu", "attention_backend": "torch_native", "skip_tokenizer_init": True}
    record = server_args.ServerArgs(**basic, hicache_size=1)
    record.resolve_once()
    view = resolving_view(record)
    return [view.enable_hierarchical_cache, view.hicache_storage_backend]


def lmcache() -> list[object]:
    from lmcache.v1.distributed import config  # the hook runs here

    basic = ["--l1-size-gb", "0.1", "--eviction-policy", "LRU", "--no-l1-use-lazy"]
    found = config.parse_args_to_config(config.get_arg_parser().parse_args(basic)).l2_adapter_config
    return [getattr(adapter, "class_name", type(adapter).__name__) for adapter in found.adapters]


def case(engine: str, wanted: dict[str, Any], *arguments: str) -> None:
    os.environ[VARIABLES[engine]] = wanted.get("variable", "{}")
    sys.path.insert(0, wanted["path"])
    exec(wanted.get("sabotage", ""), {})
    said: list[str] = []
    try:
        from kvpool.engines.common import without_pool

        without_pool.report_without_pool = lambda problem, _engine: said.append(problem)
    except Exception:
        traceback.print_exc()  # the damaged client is the case
    sys.modules.pop("sitecustomize", None)
    __import__("sitecustomize")  # as at the start of a process
    found = {"sglang": sglang, "lmcache": lmcache}[engine](*arguments)
    say(found=found, said=said)


def main(engine: str, *arguments: str) -> None:
    import torch  # noqa: F401  once for all cases, as what follows

    if engine == "sglang":
        import sglang.srt.mem_cache.hicache_storage  # noqa: F401
        import transformers  # noqa: F401
    else:
        import lmcache.v1.distributed.l2_adapters.base  # noqa: F401
    hooked = {"sglang": "sglang.srt.server_args", "lmcache": "lmcache.v1.distributed.config"}[engine]
    assert hooked not in sys.modules
    for line in sys.stdin:
        child = os.fork()
        if not child:
            try:
                case(engine, json.loads(line), *arguments)
            except BaseException:
                say(failure=traceback.format_exc()[-3000:])
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
