"""vLLM's OpenAI-compatible server on the CPU, as one node's engine."""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from bench.peers import environment
from bench.sessions.processes import Child, free_ports
from bench.sessions.request import Server

__all__ = ["Engine", "Home", "Room", "Wiring"]

ROOT = Path(__file__).resolve().parents[2]
MODEL = "kvpool-bench"
KV_BYTES_PER_TOKEN = {"bfloat16": 16 * 1024, "float32": 32 * 1024}  # of e2e/engine/model.py
START_S = 240.0
BATCH_TOKENS = 2048  # a prefill is computed in pieces of so many tokens
PAGE_TOKENS = 32  # of the engine's own cache
BLOCK_TOKENS = 256  # of what is stored outside of it, in every system


@dataclass(frozen=True)
class Room:
    """Memory of one engine, in tokens: its own KV cache, and host memory beside it."""

    engine_tokens: int
    host_tokens: int
    dtype: str = "float32"

    @classmethod
    def for_tokens(cls, longest: int, dtype: str) -> Room:
        """The engine holds one of the longest sessions, its host memory 1.5: a busy node holds few of its many."""
        blocks = -(-longest // BLOCK_TOKENS) + 1
        return cls(blocks * BLOCK_TOKENS, (blocks + blocks // 2) * BLOCK_TOKENS, dtype)

    @property
    def engine_bytes(self) -> int:
        # one page more: vLLM keeps an empty one
        return (self.engine_tokens + PAGE_TOKENS) * KV_BYTES_PER_TOKEN[self.dtype]

    @property
    def host_bytes(self) -> int:
        return self.host_tokens * KV_BYTES_PER_TOKEN[self.dtype]


@dataclass(frozen=True)
class Wiring:
    """What a system gives to an engine of a node."""

    connector: dict[str, Any] | None = None
    env: dict[str, str] = field(default_factory=dict)


class Home:
    """The engine's environment and the peers' libraries (made on first use), and what every process of them gets."""

    def __init__(self, work: Path) -> None:
        self.python, self.path = environment.make()
        self.engine = self.path[-1].parent
        extras = work / "path"
        extras.mkdir()
        # as in an injected pod: the client's code and xxhash, which the engine's environment has not
        (extras / "xxhash").symlink_to(Path(xxhash.__file__).parent)
        self._client = [ROOT / "client" / "src", extras]

    def env(self) -> dict[str, str]:
        path = [*self._client, self.path[0], self.engine / "testing", *self.path[1:]]
        return {
            **{k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "KVPOOL_", "LMCACHE_"))},
            "PYTHONPATH": os.pathsep.join(map(str, path)),
            "PYTHONHASHSEED": "0",
            "PYTHONWARNINGS": "ignore",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "LMCACHE_TRACK_USAGE": "false",
            "LMCACHE_DISABLE_BANNER": "1",
            "VLLM_CACHE_ROOT": str(self.engine / "vllm-cache"),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            # the scheduler and the one worker share a process, as with a GPU; on CPUs vLLM wants this to be said
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))),
            "VLLM_HOST_IP": "127.0.0.1",
            "GLOO_SOCKET_IFNAME": "lo",
            "TOKENIZERS_PARALLELISM": "false",
            "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache; the server listens on the loopback interface
        }


class Engine:
    """One server, until `end`. `server` asks it. Made at once, ready after `wait_ready`."""

    def __init__(self, home: Home, name: str, log: Path, room: Room, wiring: Wiring) -> None:
        (port,) = free_ports(1)
        command = [
            home.python, "-m", "vllm.entrypoints.openai.api_server",
            "--model", str(home.engine / "model"), "--served-model-name", MODEL,
            "--host", "127.0.0.1", "--port", str(port),
            "--dtype", room.dtype, "--seed", "0", "--enforce-eager",
            "--max-model-len", str(room.engine_tokens), "--max-num-seqs", "4",
            "--max-num-batched-tokens", str(BATCH_TOKENS), "--block-size", str(PAGE_TOKENS),
            "--distributed-executor-backend", "uni", "--kv-cache-memory-bytes", str(room.engine_bytes),
            "--prefix-caching-hash-algo", "sha256_cbor", "--enable-prompt-tokens-details",
        ]  # fmt: skip
        if wiring.connector is not None:
            command += ["--kv-transfer-config", json.dumps(wiring.connector)]
        self.server = Server(f"http://127.0.0.1:{port}/v1", MODEL)
        self._child = Child(name, command, log, {**home.env(), **wiring.env})

    def wait_ready(self) -> None:
        """StartError if it does not come up."""

        def ready() -> bool:
            with contextlib.suppress(OSError, ValueError):
                return bool(self.server.models())
            return False

        self._child.wait_ready(ready, START_S)
        # what a process sets up on its first requests is nobody's time to the first token
        for length in (40, BATCH_TOKENS // 2):
            self.server.complete([3 + n % 200 for n in range(length)], 4)

    def forget(self, limit_s: float = 10.0) -> bool:
        """Empty the engine's own prefix cache, and not what is behind it. False if requests or transfers forbid it."""
        until = time.monotonic() + limit_s
        while not json.loads(self.server.post("/reset_prefix_cache"))["success"]:
            if time.monotonic() > until:
                return False
            time.sleep(0.1)
        return True

    def ask_to_end(self) -> None:
        self._child.ask_to_end()

    def end(self) -> None:
        self._child.end()
