"""A pool on one machine, from the same KVCachePool that Kubernetes gets.

The operator's own functions turn the YAML into `pool.json`, the client's configuration and the engine's connector; what
differs from a cluster is said here: every path lies below a directory of the demo, each node has a loopback address of
its own, the sidecars are processes that the demo starts instead of a DaemonSet's pods, and waiting times are PATIENCE
times longer, because here three nodes, an index and an engine share the cores of one.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import sys
import tempfile
import time
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from kvpool.config import CLIENT_CONFIG_ENV, dumps
from kvpool_demo.processes import Child, StartError, wait_for
from kvpool_operator.api.v1alpha1 import KVCachePool
from kvpool_operator.desired.config import to_client_config, to_pool_config
from kvpool_operator.injection.connector import client_config, vllm_connector
from kvpool_operator.k8s.merge_patch import merge_patch

if TYPE_CHECKING:
    from kvpool.config import ClientConfig, Deadlines, PoolConfig

__all__ = ["NODE_NAMES", "Pool"]

NODE_NAMES = ("node-a", "node-b", "node-c")
TENANT = "team-a"
START_SECONDS = 30.0
SETTLE_SECONDS = 60.0
MAX_STATUS = 1 << 20
PATIENCE = 10


class Pool:
    """Three sidecars, the index, the shared directory. Made with `start`; `stop` leaves no process."""

    def __init__(self, manifest: Path, directory: Path, logs: Path) -> None:
        self.pool = KVCachePool.parse(yaml.safe_load(manifest.read_text()))
        self.block_tokens = self.pool.spec.cache.block_tokens
        self._directory = directory
        self._logs = logs
        self._sockets = Path(tempfile.mkdtemp(prefix="kvpool-demo-"))  # a unix socket's path holds 107 bytes at most
        self._secret = directory / "secret"
        self._addresses = {name: f"127.0.0.{11 + i}" for i, name in enumerate(NODE_NAMES)}
        self._children: dict[str, Child] = {}
        self._index_port, self._peer_port, self._http_port = _free_ports(["127.0.0.1", *self._addresses.values()], 3)

    def start(self) -> None:
        """All of it, and wait until it is ready. StartError says what is not."""
        self._secret.mkdir(parents=True, mode=0o700)
        for name in ("pool-secret", "index-password"):
            (self._secret / name).write_text(secrets.token_hex(32))
        index = ["index-server", "--port", str(self._index_port), "--dir", str(self._directory / "index")]
        self._spawn("index", index, {"KVPOOL_SECRET_DIR": str(self._secret)})
        for name in NODE_NAMES:
            self._launch(name)
        for name in NODE_NAMES:
            self._wait_ready(name)

    def start_node(self, name: str) -> None:
        """A node that was stopped is back, its drive as it was."""
        self._launch(name)
        self._wait_ready(name)

    def stop_node(self, name: str) -> None:
        """Its sidecar ends."""
        self._children.pop(name).stop()

    def stop(self) -> None:
        """Every process that was started here ends; files stay, but for the sockets."""
        for child in self._children.values():
            child.terminate()
        for child in self._children.values():
            child.stop()
        self._children.clear()
        shutil.rmtree(self._sockets, ignore_errors=True)

    def client(self, node: str) -> ClientConfig:
        """What the webhook would tell an engine on `node`."""
        made = to_client_config(self.pool)
        return replace(made, socket=str(self._socket(node)), deadlines=_patient(made.deadlines))

    def environment(self, node: str) -> dict[str, str]:
        """Of an engine on `node`."""
        return {CLIENT_CONFIG_ENV: client_config(self.client(node))}

    def connector(self, engine_id: str, host_memory_bytes: int) -> dict[str, Any]:
        """The engine's --kv-transfer-config: the webhook's, and the patch that an engine without a GPU needs."""
        patch = {
            "engine_id": engine_id,
            "kv_connector_extra_config": {
                "spec_name": "CpuTieringSpec",
                "spec_module_path": "kvpool_cpu_worker",
                "cpu_bytes_to_use": host_memory_bytes,
            },
        }
        made = vllm_connector(block_tokens=self.block_tokens, host_memory_bytes=host_memory_bytes)
        return merge_patch(made, patch)  # type: ignore[no-any-return]

    def install_client(self) -> Path:
        """The client's code as the init container brings it to a pod, optional native parts included."""
        target = self._directory / "client"
        child = Child("install-client", self._command("install-client", str(target)), self._logs / "install-client.log")
        wait_for("the client's code", child, lambda: not child.alive, START_SECONDS)
        if child.status != 0:
            raise StartError(f"the client's code was not installed:\n{child.tail()}")
        return target

    def status(self, node: str) -> dict[str, Any]:
        """/status of a node's sidecar. OSError if it does not answer."""
        url = f"http://{self._addresses[node]}:{self._http_port}/status"
        with urllib.request.urlopen(url, timeout=5) as answer:
            found: dict[str, Any] = json.loads(answer.read(MAX_STATUS))
        return found

    def settle(self) -> None:
        """Wait until what was stored is in the index and on the shared tier. StartError if it takes too long."""
        until = time.monotonic() + SETTLE_SECONDS
        while not all(_settled(self.status(name)) for name in self._running()):
            if time.monotonic() > until:
                raise StartError(f"blocks are not announced and copied after {SETTLE_SECONDS:.0f} s")
            time.sleep(0.05)

    def bytes_copied(self) -> int:
        """Bytes of blocks on the shared tier."""
        root = self._directory / "shared"
        return sum(f.stat().st_size for f in root.rglob("*") if f.is_file())

    def _running(self) -> list[str]:
        return [name for name in NODE_NAMES if name in self._children]

    def _socket(self, node: str) -> Path:
        return self._sockets / f"{node}.sock"

    def config(self, node: str) -> PoolConfig:
        """`pool.json` of `node`: the operator's, with paths and ports of this machine."""
        made = to_pool_config(
            self.pool,
            pool_id="demo-" + self.pool.metadata.name,
            index_url=f"redis://127.0.0.1:{self._index_port}/0",
            tier_path=lambda tier: str(self._tier_path(node, tier)),
        )
        return replace(
            made,
            index=replace(made.index, lookup_timeout_ms=made.index.lookup_timeout_ms * PATIENCE),
            peer=replace(made.peer, port=self._peer_port, connect_timeout_ms=made.peer.connect_timeout_ms * PATIENCE),
            deadlines=_patient(made.deadlines),
            http_port=self._http_port,
        )

    def _tier_path(self, node: str, tier: str) -> Path:
        """Each node has its own drive; the shared tier is the same directory for all."""
        spec = next(t for t in self.pool.spec.tiers if t.name == tier)
        return self._directory / ("shared" if spec.shared is not None else node) / tier

    def _launch(self, node: str) -> None:
        config = self.config(node)
        for path in [tier.path for tier in config.local] + ([config.shared.path] if config.shared else []):
            Path(path).mkdir(parents=True, exist_ok=True)
        file = self._directory / node / "pool.json"
        file.write_text(dumps(config))
        variables = {
            "KVPOOL_CONFIG": str(file),
            "KVPOOL_SECRET_DIR": str(self._secret),
            "KVPOOL_NODE": node,
            "KVPOOL_ADDRESS": self._addresses[node],
        }
        self._spawn(node, ["serve", "--socket", f"{self._socket(node)}={TENANT}"], variables)

    def _spawn(self, name: str, arguments: list[str], variables: dict[str, str]) -> None:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("KVPOOL_")} | variables
        self._children[name] = Child(name, self._command(*arguments), self._logs / f"{name}.log", environment)

    @staticmethod
    def _command(*arguments: str) -> list[str]:
        return [sys.executable, "-m", "kvpool_sidecar", *arguments]

    def _wait_ready(self, node: str) -> None:
        def ready() -> bool:
            try:
                status = self.status(node)
            except OSError:
                return False
            return bool(status["ready"] and status["index"]["connected"])

        wait_for(f"the sidecar of {node}", self._children[node], ready, START_SECONDS)


def _patient(deadlines: Deadlines) -> Deadlines:
    return replace(deadlines, lookup_ms=deadlines.lookup_ms * PATIENCE, load_min_ms=deadlines.load_min_ms * PATIENCE)


def _settled(status: dict[str, Any]) -> bool:
    shared = status["shared"]
    handled = sum(shared["copies"].values())
    copied = not shared["configured"] or (shared["waiting"] == 0 and handled >= status["stored"].get("blocks", 0))
    return bool(copied and status["index"]["announced"] >= status["blocks"])


def _free_ports(addresses: list[str], count: int) -> list[int]:
    """Ports that are free on all `addresses`. Somebody may still take one before it is used: that shows at start."""
    found: list[int] = []
    for _ in range(200):
        with socket.socket() as probe:
            probe.bind((addresses[0], 0))
            port: int = probe.getsockname()[1]
        if port not in found and all(_is_free(address, port) for address in addresses):
            found.append(port)
        if len(found) == count:
            return found
    raise StartError("no free ports on the loopback addresses 127.0.0.11 to 127.0.0.13")


def _is_free(address: str, port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((address, port))
        except OSError:
            return False
    return True
