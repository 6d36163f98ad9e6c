"""What vLLM's own configuration makes of the plug-in, one forked process per case. Run with the engine's Python.

    python plugin_process.py MODEL_DIRECTORY

Reads lines of JSON: {"connector": text of the variable, "socket": path, "sabotage": Python that runs before, "user": a
KVTransferConfig, "path": a folder before the client's}. Each is answered by a line that starts with `@@`: the connector
of the VllmConfig that the engine would start with, its extra configuration, and the sentence that was reported.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Any


def say(**answer: object) -> None:
    os.write(1, b"\n@@" + json.dumps(answer, default=str).encode() + b"\n")


def case(model: str, wanted: dict[str, Any]) -> None:
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.plugins import load_general_plugins

    os.environ["KVPOOL_VLLM_KV_TRANSFER_CONFIG"] = wanted["connector"]
    sys.path[:0] = [wanted["path"]] if wanted.get("path") else []
    exec(wanted.get("sabotage", ""), {})
    load_general_plugins()
    said: list[str] = []
    try:
        from kvpool.engines.common import without_pool

        without_pool.report_without_pool = lambda problem, _engine: said.append(problem)
    except Exception:
        traceback.print_exc()  # the damaged client is the case
    user = wanted.get("user")
    options = {"kv_transfer_config": KVTransferConfig(**user)} if user else {}
    arguments = EngineArgs(model=model, skip_tokenizer_init=True, dtype="float32", max_model_len=512, **options)
    config = arguments.create_engine_config()
    transfer = config.kv_transfer_config
    say(
        connector=transfer and transfer.kv_connector,
        extra=transfer and transfer.kv_connector_extra_config,
        algorithm=config.cache_config.prefix_caching_hash_algo,
        said=said,
    )


def main(model: str) -> None:
    import vllm.engine.arg_utils
    import vllm.v1.kv_offload.tiering.spec  # noqa: F401  once for all cases

    for line in sys.stdin:
        child = os.fork()
        if not child:
            try:
                case(model, json.loads(line))
            except BaseException:
                say(failure=traceback.format_exc()[-3000:])
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(sys.argv[1])
