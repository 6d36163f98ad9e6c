"""Real sidecars for pools of the control plane: processes at the nodes' addresses, with the pool's own Secret and
configuration, and one real Redis as index."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import urllib.request
from typing import TYPE_CHECKING, Any, Self

from api import until
from kubelet import HTTP_PORT, address

from kvpool import config
from kvpool.client import Client
from kvpool.protocol.keys import block_id, fingerprint

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from conftest import Pools

INDEX_PORT = 16379
SIZE = 64 * 1024
FINGERPRINT = fingerprint({"test": "control plane"})


def _block_id(n: int) -> bytes:
    return block_id(FINGERPRINT, str(n).encode())


def _payload(n: int) -> bytes:
    return n.to_bytes(4, "big") * (SIZE // 4)


def sidecar_token(pools: Pools, pool: str, node: str, audience: str = "kvpool.dev/issuer", **spec: Any) -> str:
    """What the kubelet would mount into the pool's sidecar on that node."""

    def bound() -> dict[str, Any] | None:
        pods = (o for k, o in pools.owned(pool).items() if k.startswith(f"pods/{pool}-sidecar"))
        return next((p for p in pods if p["spec"].get("nodeName") == node), None)

    pod = until(f"{node} has a sidecar pod", bound)
    reference = {"apiVersion": "v1", "kind": "Pod", "name": pod["metadata"]["name"], "uid": pod["metadata"]["uid"]}
    request = {"audiences": [audience], "expirationSeconds": 3600, "boundObjectRef": reference, **spec}
    account = f"/api/v1/namespaces/{pod['metadata']['namespace']}/serviceaccounts/{pool}-sidecar"
    token: str = pools.api.call(
        "POST",
        f"{account}/token",
        {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": request},
    )["status"]["token"]
    return token


class RealSidecars:
    """`with RealSidecars(pools, "chat", directory) as s: s.start("node-a")`."""

    def __init__(self, pools: Pools, pool: str, directory: Path) -> None:
        self._directory = directory
        owned = pools.owned(pool)
        self._config = config.loads(
            config.PoolConfig, owned[f"configmaps/{pool}-config"]["data"]["pool.json"], where="pool.json"
        )
        self.secret = directory / "secret"
        self.secret.mkdir(parents=True)
        for name, value in owned[f"secrets/{pool}-secret"]["data"].items():
            (self.secret / name).write_bytes(base64.b64decode(value))
        self._pools, self._pool = pools, pool
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._index = address("node-z")

    def start(self, node: str, tenant: str = "team", *, overlap: bool = False) -> None:
        """A sidecar with its own drive, which has joined the index. `overlap`: another may take over from it."""
        home = self._directory / node
        (home / "nvme").mkdir(parents=True, exist_ok=True)
        tiers = tuple(dataclasses.replace(t, path=str(home / "nvme")) for t in self._config.local)
        (home / "token").write_text(sidecar_token(self._pools, self._pool, node))
        index = dataclasses.replace(self._config.index, url=f"redis://{self._index}:{INDEX_PORT}/0")
        made = dataclasses.replace(self._config, local=tiers, index=index, shared=None)
        (home / "pool.json").write_text(config.dumps(made))
        arguments = ["--node", node, "--address", address(node), "--config", str(home / "pool.json")]
        arguments += self._issuer(node)
        more = ["--allow-takeover"] if overlap else []
        self._spawn(node, ["serve", *arguments, "--socket", f"{self.socket(node)}={tenant}", *more])
        until(f"{node} has joined", lambda: self.status(node)["index"]["connected"], timeout=60)

    def start_beside(self, node: str, tenant: str = "team") -> None:
        """The one that takes over, at the node's second address. It answers at the same socket when it serves."""
        home = self._directory / node
        arguments = [
            "--node",
            node,
            "--address",
            address(node, 1),
            "--config",
            str(home / "pool.json"),
            "--allow-takeover",
            *self._issuer(node),
        ]
        self._spawn(f"{node}-next", ["serve", *arguments, "--socket", f"{self.socket(node)}={tenant}"])

    def _issuer(self, node: str) -> list[str]:
        token = self._directory / node / "token"
        return ["--issuer-url", self._pools.issuer_url, "--issuer-token", str(token)]

    def socket(self, node: str) -> Path:
        return self._directory / node / "kv.sock"

    def status(self, node: str, place: int = 0) -> Any:
        url = f"http://{address(node, place)}:{HTTP_PORT}/status"
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as answer:
            return json.load(answer)
        name = f"{node}-next" if place else node
        assert self._processes[name].poll() is None, (self._directory / f"{name}.log").read_text()[-3000:]
        raise KeyError(f"{node} does not answer yet")

    def store(self, node: str, numbers: range) -> None:
        """Blocks of 64 KiB, by number."""
        with self._client(node) as client:
            done = client.put_from([_block_id(n) for n in numbers], [_payload(n) for n in numbers])
        assert all(one.ok for one in done), done

    def loads(self, node: str, numbers: range) -> int:
        """How many of them can be had there, each the right one."""
        buffers = [bytearray(SIZE) for _ in numbers]
        with self._client(node) as client:
            found = client.get_into([_block_id(n) for n in numbers], buffers)
        good = [(n, b) for n, b, one in zip(numbers, buffers, found, strict=True) if one.ok]
        assert all(bytes(b) == _payload(n) for n, b in good)
        return len(good)

    @contextlib.contextmanager
    def _client(self, node: str) -> Iterator[Client]:
        patient = config.Deadlines(lookup_ms=5000, load_min_ms=20_000, store_ms=30_000)
        client = Client(config.ClientConfig(socket=str(self.socket(node)), deadlines=patient), fingerprint=FINGERPRINT)
        try:
            assert client.wait_connected(30)
            yield client
        finally:
            client.close()

    def kill(self, node: str) -> None:
        process = self._processes.pop(node)
        process.kill()
        process.wait()

    def __enter__(self) -> Self:
        folder = str(self._directory / "index")
        self._spawn("index", ["index-server", "--bind", self._index, "--port", str(INDEX_PORT), "--dir", folder])
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self._processes):
            self.kill(name)

    def _spawn(self, name: str, arguments: list[str]) -> None:
        arguments = [arguments[0], "--secret-dir", str(self.secret), *arguments[1:]]
        command = [sys.executable, "-m", "kvpool_sidecar", *arguments]
        with (self._directory / f"{name}.log").open("wb") as log:
            self._processes[name] = subprocess.Popen(command, stdout=log, stderr=log, env=dict(os.environ))
