"""A worker of Dynamo without an engine: it answers each request with one token. Run with the engine's Python.

    python dynamo_worker_process.py MODEL NAME BLOCK ZMQ_ENDPOINT

Its KV events are those of the sidecar at ZMQ_ENDPOINT, relayed as Dynamo's vLLM worker relays its engine's. Each
request is a line on its standard output: `@@` and the number of tokens of the prompt.
"""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


async def main(model: str, name: str, block: int, events: str) -> None:
    from dynamo.llm import KvEventPublisher, ModelInput, ModelRuntimeConfig, ModelType, WorkerType, register_model
    from dynamo.runtime import DistributedRuntime

    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp", event_plane="zmq")
    endpoint = runtime.endpoint("kvpool.backend.generate")

    async def generate(request: dict[str, Any], context: Any = None) -> AsyncIterator[dict[str, Any]]:
        print(f"@@{len(request['token_ids'])}", flush=True)
        yield {"token_ids": [5], "finish_reason": "stop"}

    publisher = KvEventPublisher(
        endpoint, kv_block_size=block, zmq_endpoint=events, zmq_topic="", enable_local_indexer=True
    )
    config = ModelRuntimeConfig()
    config.total_kv_blocks = 4096
    config.enable_local_indexer = True
    await register_model(
        ModelInput.Tokens,
        ModelType.Completions,
        endpoint,
        model,
        name,
        worker_type=WorkerType.Aggregated,
        kv_cache_block_size=block,
        runtime_config=config,
        ignore_weights=True,
    )
    await endpoint.serve_endpoint(generate)
    del publisher


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]))
