"""A thin, black-box way to a cluster: kubectl and helm as a user would call them, and waiting for conditions."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parent.parent


class CommandError(AssertionError):
    """A command failed; the message holds what it printed."""


def run(*args: str, stdin: str | None = None, timeout: float = 120, check: bool = True) -> str:
    """Run one command in the repository's root and return its standard output."""
    done = subprocess.run(args, cwd=ROOT, input=stdin, capture_output=True, text=True, timeout=timeout, check=False)
    if check and done.returncode:
        raise CommandError(f"{' '.join(args)}: exit {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
    return done.stdout if check else done.stdout + done.stderr


def kubectl(*args: str, stdin: str | None = None, timeout: float = 120, check: bool = True) -> str:
    return run("kubectl", *args, stdin=stdin, timeout=timeout, check=check)


def get(*args: str) -> Any:
    """`kubectl get ... -o json`; None if it is not there."""
    text = kubectl("get", *args, "-o", "json", "--ignore-not-found")
    return json.loads(text) if text.strip() else None


def items(*args: str) -> list[dict[str, Any]]:
    found = get(*args)
    return [] if found is None else found["items"]


def apply(text: str) -> str:
    return kubectl("apply", "-f", "-", stdin=text)


def until(what: str, probe: Callable[[], Any], timeout: float, every: float = 0.5) -> Any:
    """Call `probe` until it returns something true; return that. Its errors count as not yet."""
    end = time.monotonic() + timeout
    last: Any = None
    while True:
        try:
            last = probe()
            if last:
                return last
        except (CommandError, KeyError, IndexError, ValueError, subprocess.TimeoutExpired) as e:
            last = e
        if time.monotonic() > end:
            raise AssertionError(f"not within {timeout:.0f} s: {what}; last seen: {str(last)[:3000]}")
        time.sleep(every)


def condition(obj: dict[str, Any] | None, kind: str) -> dict[str, Any]:
    """The condition of type `kind`, or an empty one."""
    found = [c for c in ((obj or {}).get("status") or {}).get("conditions", []) if c["type"] == kind]
    return found[0] if found else {}


def is_ready(obj: dict[str, Any] | None) -> bool:
    return condition(obj, "Ready").get("status") == "True"


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class Proxy:
    """HTTP to pods through the API server, so that nothing need listen on this machine's network."""

    def __init__(self, folder: Path) -> None:
        self._path = str(folder / "api.sock")
        self._process = subprocess.Popen(["kubectl", "proxy", f"--unix-socket={self._path}"], stdout=subprocess.DEVNULL)
        until("kubectl proxy listens", lambda: os.path.exists(self._path), 15, every=0.05)

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(10)

    def request(self, namespace: str, pod: str, port: int, path: str, body: Any = None, timeout: float = 120) -> str:
        """GET, or POST of `body` as JSON; CommandError for anything but 200."""
        connection = _UnixConnection(self._path, timeout)
        url = f"/api/v1/namespaces/{namespace}/pods/{pod}:{port}/proxy{path}"
        try:
            if body is None:
                connection.request("GET", url)
            else:
                connection.request("POST", url, json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            text = answer.read().decode()
        except OSError as e:
            raise CommandError(f"{url}: {e}") from e
        finally:
            connection.close()
        if answer.status != 200:
            raise CommandError(f"{url}: HTTP {answer.status}: {text[:2000]}")
        return text


def helm_values() -> list[str]:
    """The images this test built; nothing is pulled."""
    operator, sidecar = os.environ["KVPOOL_OPERATOR_IMAGE"], os.environ["KVPOOL_SIDECAR_IMAGE"]
    out = []
    for part, image in (("operator", operator), ("sidecar", sidecar)):
        repository, tag = image.rsplit(":", 1)
        out += ["--set", f"{part}.image.repository={repository}", "--set", f"{part}.image.tag={tag}"]
    # the images are on the nodes of pools, not on the control plane
    return [*out, "--set-json", "agent.tolerations=[]"]
