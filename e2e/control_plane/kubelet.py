"""Plays scheduler and kubelet for a control plane without nodes: pods of DaemonSets and StatefulSets start at once.

Node `node-a` has the address 127.N.0.2, `node-b` 127.N.0.3, and so on, in a net that no other run has; `SidecarDouble`
answers for a sidecar there. While one sidecar takes over from another, the second has 127.N.1.2 and so on.
"""

from __future__ import annotations

import contextlib
import functools
import json
import socket
import threading
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from api import JSON, MERGE, Api, ApiError

HTTP_PORT = 7422


@functools.cache
def net() -> str:
    """The first two bytes of this run's addresses; the net is its own as long as the process lives."""
    for number in range(64, 128):
        held = socket.socket()
        with contextlib.suppress(OSError):
            held.bind((f"127.{number}.0.1", HTTP_PORT))
            _held.append(held)
            return f"127.{number}"
        held.close()
    raise RuntimeError("64 runs of these tests at a time are too many")


_held: list[socket.socket] = []


def address(node: str, place: int = 0) -> str:
    """Of the only pod there, or of the one beside it (1)."""
    return f"{net()}.{place}.{2 + ord(node[-1]) - ord('a')}"


class Kubelet:
    """A thread that makes every pod Ready, except those on nodes that are `down`."""

    def __init__(self, api: Api, nodes: list[str]) -> None:
        self._api = api
        self._nodes = nodes
        self.down: set[str] = set()
        self.failing: dict[str, str] = {}  # node, or address of a pod: what the server's container printed last
        self.apart = False  # of two pods on a node each has an address of its own
        self.unready: set[str] = set()  # addresses of pods that run and are not ready
        self._addresses: dict[str, str] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kubelet")

    def __enter__(self) -> Self:
        for node in self._nodes:
            self._api.call("POST", "/api/v1/nodes", {"metadata": {"name": node, "labels": {"node": node}}})
            # no controller takes the taint of a new node away here
            self._api.call("PATCH", f"/api/v1/nodes/{node}", {"spec": {"taints": None}}, MERGE)
            status = {
                "conditions": [{"type": "Ready", "status": "True"}],
                "allocatable": {"cpu": "8", "memory": "64Gi", "pods": "110"},
            }
            self._api.call("PATCH", f"/api/v1/nodes/{node}/status", {"status": status}, MERGE)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(30)

    def _run(self) -> None:
        while not self._stop.wait(0.1):
            with contextlib.suppress(ApiError, OSError):
                for pod in self._api.items("/api/v1/pods"):
                    with contextlib.suppress(ApiError):
                        self._step(pod)

    def _step(self, pod: dict[str, Any]) -> None:
        meta = pod["metadata"]
        path = f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}"
        node = pod["spec"].get("nodeName")
        if not meta.get("ownerReferences"):
            return
        if not node:
            target = {"apiVersion": "v1", "kind": "Node", "name": self._wanted_node(pod)}
            binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": meta["name"]}, "target": target}
            self._api.call("POST", f"{path}/binding", binding, JSON)
        elif node in self.down:
            return
        elif "deletionTimestamp" in meta:
            if any("ephemeral" in volume for volume in pod["spec"].get("volumes") or []):
                # its claim is protected until the pod has ended
                self._api.call("PATCH", f"{path}/status", {"status": {"phase": "Succeeded"}}, MERGE)
            self._api.delete(path, gracePeriodSeconds=0)
        else:
            self._set_status(pod, path, node)

    def _address(self, pod: dict[str, Any], node: str) -> str:
        """The first that no other sidecar of the node has."""
        if not self.apart or pod["metadata"]["labels"].get("app.kubernetes.io/component") != "sidecar":
            return address(node)
        uid = pod["metadata"]["uid"]
        if uid not in self._addresses:
            living = {p["metadata"]["uid"] for p in self._api.items("/api/v1/pods")}
            taken = {a for other, a in self._addresses.items() if other in living}
            self._addresses[uid] = next(a for a in (address(node), address(node, 1)) if a not in taken)
        return self._addresses[uid]

    def _set_status(self, pod: dict[str, Any], path: str, node: str) -> None:
        where = self._address(pod, node)
        broken = self.failing.get(node) or self.failing.get(where)
        good = broken is None and where not in self.unready
        ready = any(
            c["type"] == "Ready" and c["status"] == "True" for c in pod.get("status", {}).get("conditions") or []
        )
        reported = pod.get("status", {}).get("containerStatuses") or [{}]
        if (
            ready == good
            and pod.get("status", {}).get("podIP")
            and ("waiting" in reported[0].get("state", {})) == bool(broken)
        ):
            return
        state: dict[str, Any] = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
        last: dict[str, Any] = {}
        if broken is not None:
            state = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}}
            last = {"terminated": {"exitCode": 2, "message": f"starting\n{broken}\n"}}
        container = {
            "name": "server",
            "ready": good,
            "restartCount": 0,
            "image": "i",
            "imageID": "i",
            "state": state,
            "lastState": last,
        }
        since = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")  # what minReadySeconds counts from
        status = {
            "phase": "Running",
            "podIP": where,
            "podIPs": [{"ip": where}],
            "conditions": [
                {"type": "Ready", "status": str(good), "lastTransitionTime": since},
                {"type": "ContainersReady", "status": str(good)},
            ],
            "containerStatuses": [container],
        }
        self._api.call("PATCH", f"{path}/status", {"status": status}, MERGE)

    def _wanted_node(self, pod: dict[str, Any]) -> str:
        affinity = pod["spec"].get("affinity", {}).get("nodeAffinity", {})
        for term in affinity.get("requiredDuringSchedulingIgnoredDuringExecution", {}).get("nodeSelectorTerms", []):
            for field in term.get("matchFields", []):
                return str(field["values"][0])
        return self._nodes[0]


class SidecarDouble:
    """Answers /status on a node's address like a sidecar that serves."""

    def __init__(self, node: str, place: int = 0) -> None:
        self.status: dict[str, Any] = {
            "node": node,
            "generation": 1,
            "ready": True,
            "capacity_bytes": 8 * 2**30,
            "used_bytes": 2**30,
            "blocks": 32,
            "index": {"configured": True, "connected": True, "epoch": "e", "announced": 32},
            "shared": {"configured": True, "available": True, "problem": ""},
            "drives": {"nvme": "ok"},
            "clients": 4,
            "cache": {
                "windows": [
                    {"window": window, "tokensAsked": 800, "tokensFound": 600, "misses": {"expired": 200}}
                    for window in ("5m", "1h")
                ],
                "models": [],
            },
            "hits": {"local": 6, "peer": 3, "shared": 0},
            "bytes": {"local": 6 * 2**25, "peer": 3 * 2**25, "shared": 0},
            "misses": {"absent": 3},
            "transport": "TCP",
            "preflight": {"version": 1, "passed": True, "findings": []},
            "fingerprints": [{"digest": "4be1c0", "engine": "vllm 0.33", "model": "llama", "bytes": 2**30}],
        }
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = json.dumps(outer.status).encode()
                self.send_response(200 if self.path == "/status" else 404)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer((address(node, place), HTTP_PORT), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name=f"status of {node}")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)
