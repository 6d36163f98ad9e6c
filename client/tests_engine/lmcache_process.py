"""LMCache's storage manager on the CPU, that obeys lines of JSON on its standard input. Run with the engine's Python.

    python lmcache_process.py MODEL          configured by LMCACHE_* in the environment

Commands: {"put": [token, ...], "tags": {...}, "single": true}, {"contains": [...]}, {"get": [...]}, {"remove": [...]},
{"stats": true}. Each chunk of a put is filled with a number that follows from its hash; `single`: each is put by a call
of its own. Answers are lines that start with `@@`.
"""

from __future__ import annotations

import json
import os
import sys
import time


def say(**answer: object) -> None:
    print("@@" + json.dumps(answer), flush=True)


def main(model: str) -> None:
    import torch
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.event_manager import EventManager
    from lmcache.v1.memory_management import MemoryFormat
    from lmcache.v1.metadata import LMCacheMetadata
    from lmcache.v1.storage_backend.storage_manager import StorageManager
    from lmcache.v1.token_database import ChunkedTokenDatabase

    config = LMCacheEngineConfig.from_env()
    size = config.chunk_size
    metadata = LMCacheMetadata(
        model, 1, 1, 0, 0, torch.bfloat16, (2, 2, size, 2, 32), role="worker", chunk_size=size
    )  # fmt: skip
    manager = StorageManager(config, metadata, EventManager())
    (remote,) = [b for b in manager.storage_backends.values() if "Remote" in str(b)]
    connector = remote.connection.getWrappedConnector()
    database = ChunkedTokenDatabase(config, metadata)
    where = "RemoteBackend-kvpool"
    shape = metadata.get_shapes()[0]
    for line in sys.stdin:
        command = json.loads(line)
        ((what, tokens),) = [(k, v) for k, v in command.items() if k not in ("tags", "single")]
        if what == "stats":
            say(**connector.stats())
            continue
        tags = {f"lmcache.tag.{name}": value for name, value in command.get("tags", {}).items()}
        keys = [key for _, end, key in database.process_tokens(tokens=tokens, request_configs=tags or None)]
        keys = keys[: len(tokens) // size]
        marks = [key.chunk_hash % 1000 for key in keys]
        if what == "put":
            objects = manager.batched_allocate(shape, torch.bfloat16, len(keys), fmt=MemoryFormat.KV_2LTD)
            for memory, mark in zip(objects, marks, strict=True):
                memory.tensor.fill_(mark)
            before = connector.stats()["stores"].get("stored", 0)
            step = 1 if command.get("single") else len(keys)
            for start in range(0, len(keys), step):
                manager.batched_put(keys[start : start + step], objects[start : start + step])
            deadline = time.monotonic() + 30
            while connector.stats()["stores"].get("stored", 0) < before + len(keys) and time.monotonic() < deadline:
                time.sleep(0.01)
            say(chunks=len(keys))
        elif what == "contains":
            say(each=[manager.contains(key) is not None for key in keys], prefix=remote.batched_contains(keys))
        elif what == "get":
            got = manager.batched_get(keys, location=where) or [None] * len(keys)
            said = [None if m is None else [float(m.tensor.min()), float(m.tensor.max())] for m in got]
            for memory in got:
                if memory is not None:
                    memory.ref_count_down()
            expected = [float(torch.tensor(float(mark), dtype=torch.bfloat16)) for mark in marks]
            say(got=said, expected=[[e, e] for e in expected])
        elif what == "remove":
            say(removed=[remote.remove(key) for key in keys])


if __name__ == "__main__":
    main(sys.argv[1])
    sys.stdout.flush()
    os._exit(0)  # LMCache's threads do not end
