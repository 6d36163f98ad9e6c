"""The systems side by side: what each starts beside the engines of nodes a and b, and what it tells them."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import socket
from typing import TYPE_CHECKING, Any

from bench.nodes import Network, Nodes
from bench.sessions.engines import BLOCK_TOKENS, Home, Room, Wiring
from bench.sessions.processes import Child, drop_shared_memory, free_ports, steady
from bench.sessions.request import Server
from kvpool_sidecar.index.redis_server import server_binary

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["NAMES", "SYSTEMS", "System"]

NODES = ("a", "b")
GIB = 1 << 30
_DRIVE = 12 * GIB
_REDIS_BYTES = 6 * GIB
# as in the demonstration: two nodes, an index and two engines share the cores of one machine
_DEADLINES = {"lookup_ms": 500, "load_min_ms": 2000}


class System:
    """No pool: an engine's own prefix cache is all there is. Started by its making; `close` ends all of it."""

    what = "vLLM's own prefix cache"

    def __init__(self, home: Home, room: Room, directory: Path, tag: str) -> None:
        self.home, self.room, self.directory, self.tag = home, room, directory, tag
        directory.mkdir()
        try:
            self.start()
        except BaseException:
            self.close()
            raise

    def start(self) -> None:
        """Start what runs beside the engines."""

    def wiring(self, node: str) -> Wiring:
        """For the engine of `node`."""
        return Wiring()

    def settle(self) -> bool:
        """Wait until all that was computed is stored and can be found. False if it takes too long."""
        return True

    def close(self) -> None:
        """End everything; what was stored goes, too."""
        drop_shared_memory(f"vllm_offload_{self.tag}-")
        shutil.rmtree(self.directory, ignore_errors=True)

    def tiered(self, node: str, tier: dict[str, Any]) -> Wiring:
        """vLLM's tiered offloading with one tier below host memory; its copies by the CPU worker of e2e/engine."""
        extra = {
            "spec_name": "CpuTieringSpec",
            "spec_module_path": "kvpool_cpu_worker",
            "cpu_bytes_to_use": self.room.host_bytes,
            "block_size": BLOCK_TOKENS,
            "offload_prompt_only": False,
            "secondary_tiers": [tier],
        }
        return Wiring(
            {
                "kv_connector": "OffloadingConnector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "engine_id": f"{self.tag}-{node}",
                "kv_connector_extra_config": extra,
            }
        )


class KVPool(System):
    """Two sidecars, each with a drive of its own, and the index."""

    what = "PoolTier, a sidecar on each node, the index in Redis"

    def start(self) -> None:
        (self.directory / "pool").mkdir()
        self._nodes = Nodes(self.directory / "pool", Network("cubic", loopback=True), _DRIVE)

    def wiring(self, node: str) -> Wiring:
        tier = {"type": "PoolTier", "module_path": "kvpool.engines.vllm", "deadlines": _DEADLINES}
        return self.tiered(node, {**tier, "socket": self._nodes.socket_of(node)})

    def settle(self) -> bool:
        def stored() -> object:
            status = [self._nodes.status(node) for node in NODES]
            # until all is announced, no two answers are the same
            missing = any(s["index"]["announced"] < s["blocks"] for s in status)
            return object() if missing else [s["blocks"] for s in status]

        return steady(stored)

    def close(self) -> None:
        if hasattr(self, "_nodes"):
            self._nodes.close()
        super().close()


class VllmFs(System):
    """vLLM's own tier in a directory that both nodes see."""

    what = "vLLM's tier `fs`, one directory for both nodes"

    def wiring(self, node: str) -> Wiring:
        return self.tiered(node, {"type": "fs", "root_dir": str(self.directory / "shared")})

    def settle(self) -> bool:
        return steady(lambda: sum(len(files) for _, _, files in os.walk(self.directory)))


class LmcacheRedis(System):
    """LMCache's server on each node, its second level in one Redis.

    Its host memory is evicted in the background, from a watermark down; loads need room above it. So it gets twice
    the memory of the others and keeps half of it free, which holds the same number of sessions.
    """

    what = "LMCache 0.5.6 MP servers, L2 adapter `resp` with Redis, LMCacheMPConnector"

    def start(self) -> None:
        ports = free_ports(1 + 2 * len(NODES))
        self._redis_port = ports[0]
        self._ports = dict(zip(NODES, ports[1::2], strict=True))
        self._children: list[Child] = []
        redis = [
            server_binary(), "--port", str(self._redis_port), "--bind", "127.0.0.1",
            "--save", "", "--appendonly", "no", "--maxmemory", str(_REDIS_BYTES),
            "--maxmemory-policy", "allkeys-lru", "--dir", str(self.directory),
        ]  # fmt: skip
        started = Child("redis-server", redis, self.directory / "redis.log", os.environ)
        self._children.append(started)
        started.wait_ready(lambda: _redis(self._redis_port, b"PING") == b"+PONG", 30)
        adapter = {"type": "resp", "host": "127.0.0.1", "port": self._redis_port}
        servers = []
        for node, http_port in zip(NODES, ports[2::2], strict=True):
            command = [
                self.home.python, "-c", "from lmcache.cli.main import main; main()", "server",
                "--host", "127.0.0.1", "--port", str(self._ports[node]),
                "--http-host", "127.0.0.1", "--http-port", str(http_port),
                "--chunk-size", str(BLOCK_TOKENS), "--l1-size-gb", str(2 * self.room.host_bytes / GIB),
                "--no-l1-use-lazy", "--supported-transfer-mode", "auto", "--shm-name", f"{self.tag}-{node}",
                "--eviction-policy", "LRU", "--eviction-trigger-watermark", "0.5", "--disable-observability",
                "--l2-prefetch-policy", "retain", "--l2-adapter", json.dumps(adapter),
            ]  # fmt: skip
            server = Child(f"lmcache-{node}", command, self.directory / f"server-{node}.log", self.home.env())
            self._children.append(server)
            servers.append((server, _answers(Server(f"http://127.0.0.1:{http_port}", ""))))
        for server, ready in servers:
            server.wait_ready(ready, 120)

    def wiring(self, node: str) -> Wiring:
        extra = {
            "lmcache.mp.host": "tcp://127.0.0.1",
            "lmcache.mp.port": self._ports[node],
            "lmcache.mp.save_decode_cache": True,
        }
        return Wiring(
            {
                "kv_connector": "LMCacheMPConnector",
                "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": extra,
            }
        )

    def settle(self) -> bool:
        return steady(lambda: _redis(self._redis_port, b"DBSIZE"))

    def close(self) -> None:
        for child in getattr(self, "_children", []):
            child.ask_to_end()
        for child in getattr(self, "_children", []):
            child.end()
        drop_shared_memory(self.tag)
        super().close()


SYSTEMS: dict[str, type[System]] = {
    "none": System,
    "kvpool": KVPool,
    "lmcache-redis": LmcacheRedis,
    "vllm-fs": VllmFs,
}
NAMES = tuple(SYSTEMS)


def _answers(server: Server) -> Callable[[], bool]:
    def asked() -> bool:
        with contextlib.suppress(OSError, ValueError, http.client.HTTPException):
            return server.healthy("/healthcheck")
        return False

    return asked


def _redis(port: int, command: bytes) -> bytes:
    """One inline command and the first line of its answer; empty if nobody answers."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5) as one:
        one.sendall(command + b"\r\n")
        return one.recv(256).split(b"\r\n")[0]
    return b""
