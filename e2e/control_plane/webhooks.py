"""Real webhook processes behind a gate that stands for their Service: it can be shut, slow, or let everything through.

The API server reaches a Service of type ExternalName at 127.0.0.1, so its name, its certificate and its caBundle are
those of a cluster.
"""

from __future__ import annotations

import itertools
import os
import select
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from api import APPLY, Api, until
from plane import free_port

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).resolve().parents[2]
HOOKS = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"


class Replica:
    """One real webhook process."""

    def __init__(self, kubeconfig: Path, log: Path, namespace: str, **settings: str) -> None:
        self.port, self.admin_port, self.log = free_port(), free_port(), log
        env = {
            **{k: v for k, v in os.environ.items() if k in ("PATH", "HOME", "LANG")},
            "KUBECONFIG": str(kubeconfig),
            "KVPOOL_NAMESPACE": namespace,
            "KVPOOL_SIDECAR_IMAGE": "kvpool/sidecar:test",
            "KVPOOL_HTTPS_PORT": str(self.port),
            "KVPOOL_ADMIN_PORT": str(self.admin_port),
            "KVPOOL_DRAIN": "0",
            **{f"KVPOOL_{name.upper()}": value for name, value in settings.items()},
        }
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kvpool_operator", "webhook"], env=env, stdout=out, stderr=out, cwd=ROOT
            )

    def ready(self) -> bool:
        assert self._process.poll() is None, self.log.read_text()[-3000:]
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.admin_port}/readyz", timeout=10) as answer:
                return bool(answer.status == 200)
        except urllib.error.HTTPError as e:
            e.close()
            return False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Gate:
    """Copies bytes between the API server and the replicas, in turn."""

    def __init__(self) -> None:
        self.mode = "open"
        """open; shut: connections are refused; slow: they are accepted and get no answer."""
        self.replicas: list[Replica] = []
        self.taken = 0
        self._turn = itertools.count()
        self._lock = threading.Lock()
        self._open_sockets: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._listener: socket.socket | None = None
        self.port = free_port()
        self.set("open")

    def set(self, mode: str) -> None:
        """Connections of before end, so that the API server makes new ones."""
        self.mode = mode
        if mode == "shut" and self._listener is not None:
            self._listener.shutdown(socket.SHUT_RDWR)
            self._listener = None
        elif mode != "shut" and self._listener is None:
            self._listener = socket.create_server(("127.0.0.1", self.port), backlog=64)
            self._run(self._accept, self._listener)
        with self._lock:
            for held in self._open_sockets:
                with suppress(OSError):
                    held.shutdown(socket.SHUT_RDWR)

    def _run(self, target: Callable[..., None], *args: Any) -> None:
        self._threads.append(threading.Thread(target=target, args=args))
        self._threads[-1].start()

    def _accept(self, listener: socket.socket) -> None:
        with listener:
            while True:
                try:
                    caller, _ = listener.accept()
                except OSError:
                    return
                self.taken += 1
                self._run(self._serve, caller)

    def _serve(self, caller: socket.socket) -> None:
        with caller, self._known(caller), suppress(OSError):
            if self.mode == "slow":
                caller.settimeout(60)
                while caller.recv(64 * 1024):
                    pass
                return
            replica = self.replicas[next(self._turn) % len(self.replicas)]
            with socket.create_connection(("127.0.0.1", replica.port)) as there, self._known(there):
                while True:
                    for source in select.select([caller, there], [], [], 60)[0]:
                        data = source.recv(64 * 1024)
                        if not data:
                            return
                        (there if source is caller else caller).sendall(data)

    @contextmanager
    def _known(self, held: socket.socket) -> Iterator[None]:
        with self._lock:
            self._open_sockets.add(held)
        try:
            yield
        finally:
            with self._lock:
                self._open_sockets.discard(held)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.set("shut")
        for thread in self._threads:
            thread.join(10)


class Webhooks:
    """Two replicas behind a gate, and the configuration that the chart makes, pointed at it."""

    def __init__(self, api: Api, gate: Gate, configuration: dict[str, Any]) -> None:
        self.api, self.gate = api, gate
        self.name = configuration["metadata"]["name"]

    def bundle(self) -> str:
        """Of all of them, because they are written together."""
        hooks = self.api.get(f"{HOOKS}/{self.name}")["webhooks"]
        (bundle,) = {str(hook["clientConfig"].get("caBundle", "")) for hook in hooks}
        return bundle


INJECTED = "kvpool.dev/injected"


def engine(name: str, pool: str) -> dict[str, Any]:
    """A pod of an engine that asks for the pool."""
    return {
        "metadata": {
            "name": name,
            "labels": {"kvpool.dev/inject": "true"},
            "annotations": {"kvpool.dev/pool": pool},
        },
        "spec": {"containers": [{"name": "engine", "image": "vllm", "command": ["vllm", "serve", "m"]}]},
    }


class Team:
    """Who makes pods in a namespace."""

    def __init__(self, api: Api, name: str, pool: str) -> None:
        self.api, self.name, self._pool = api, name, pool
        self.pods = f"/api/v1/namespaces/{name}/pods"
        if api.get(f"/api/v1/namespaces/{name}") is None:
            api.call("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
        until("the account is there", lambda: api.get(f"/api/v1/namespaces/{name}/serviceaccounts/default"))

    def admitted(self, name: str, *, dry: bool = False) -> tuple[bool, float]:
        """Whether the new pod has the pool in it, and how many seconds its making took."""
        began = time.monotonic()
        made = self.api.call("POST", f"{self.pods}?dryRun=All" if dry else self.pods, engine(name, self._pool))
        return INJECTED in made["metadata"]["annotations"], time.monotonic() - began

    def until_injecting(self) -> None:
        """API servers read the configuration with some delay."""
        until("new pods are injected", lambda: self.admitted("probe", dry=True)[0])


def serve(
    api: Api, chart: list[dict[str, Any]], kubeconfig: Path, folder: Path, namespace: str, **settings: str
) -> Iterator[Webhooks]:
    """Two replicas; all of it goes afterwards."""
    configuration, selectors = [m for m in chart if m["kind"] == "MutatingWebhookConfiguration"]
    (service,) = [m for m in chart if m["kind"] == "Service" and "webhook" in m["metadata"]["name"]]
    with ExitStack() as stack:
        gate = stack.enter_context(Gate())
        for hook in configuration["webhooks"]:
            hook["clientConfig"]["service"]["port"] = gate.port
        service["spec"] = {"type": "ExternalName", "externalName": "127.0.0.1"}
        services = f"/api/v1/namespaces/{namespace}/services/{service['metadata']['name']}"
        hooks = f"{HOOKS}/{configuration['metadata']['name']}"
        selected = f"{HOOKS}/{selectors['metadata']['name']}"
        secret = f"/api/v1/namespaces/{namespace}/secrets/kvpool-webhook-ca"
        for path in (services, hooks, selected, secret):
            stack.callback(api.delete, path)
        api.call("PATCH", f"{services}?fieldManager=helm&force=true", service, APPLY)
        api.call("PATCH", f"{hooks}?fieldManager=helm&force=true", configuration, APPLY)
        api.call("PATCH", f"{selected}?fieldManager=helm&force=true", selectors, APPLY)
        for n in ("a", "b"):
            gate.replicas.append(
                stack.enter_context(Replica(kubeconfig, folder / f"webhook-{n}", namespace, **settings))
            )
        for replica in gate.replicas:
            until("the webhook is ready", replica.ready)
        yield Webhooks(api, gate, configuration)
