"""One agent serves all pools of a node: no pool gets, delays or breaks what is another's. Real agent processes."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest
from sc_kubelet import POOL, Kubelet, pod, sidecar
from sc_nodes import Process, wait_for

from kvpool_sidecar.rendezvous.pods import parse_pod, parse_sidecar

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

OTHER = "other/test"


class ServerDouble:
    """Listens as a sidecar's server does and keeps what it is given; it plays hostile servers."""

    def __init__(self, path: Path, *, silent: bool = False, reply: bytes = b"") -> None:
        self.got: dict[str, dict] = {}
        self.connections = self.sent = 0
        self._silent, self._reply = silent, reply
        self._closed = threading.Event()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        fd = os.open(path.parent, os.O_PATH)
        self._listener.bind(f"/proc/self/fd/{fd}/{path.name}")
        os.close(fd)
        self._listener.listen(4)
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError):
            while self._reply:
                sock.sendall(self._reply)
                self.sent += 1
            while not self._silent:
                data, fds, _, _ = socket.recv_fds(sock, 4096, 4)
                if not data:
                    return
                for fd in fds:
                    os.close(fd)
                message = json.loads(data)
                if message["op"] == "add":
                    self.got[message["pod"]] = message
            self._closed.wait(60)  # keeps the connection

    def close(self) -> None:
        self._closed.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


class Node:
    """A node's kubelet directory and its agent."""

    def __init__(self, directory: Path) -> None:
        pods_dir = directory / "pods"
        pods_dir.mkdir(mode=0o750)
        self.kubelet = Kubelet(pods_dir, directory)
        self.servers: list[ServerDouble] = []
        arguments = [f"--pods-dir={pods_dir}", f"--pods-file={self.kubelet.file}", "--node=n"]
        self.agent = Process(directory / "agent.log", ["agent", *arguments])
        self.agent.start()

    def server(self, raw: dict, **how) -> ServerDouble:
        self.servers.append(ServerDouble(self.kubelet.handoff(raw), **how))
        return self.servers[-1]

    def log(self) -> str:
        return self.agent.log.read_text()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    made.agent.stop()
    for server in made.servers:
        server.close()


def test_a_pool_gets_the_sockets_of_its_own_pods_alone(node):
    ours, theirs = node.server(sidecar("a")), node.server(sidecar("b", OTHER))
    node.kubelet.add(pod("one"))
    node.kubelet.add(pod("two", pool=OTHER))
    wait_for(lambda: ours.got and theirs.got, "both have their pods")
    assert (set(ours.got), set(theirs.got)) == ({"one"}, {"two"})
    assert ours.got["one"]["namespace"] == "team-a"


@pytest.mark.parametrize(
    "hostile",
    [
        {"silent": True},
        {"reply": b'{"op": "refused", "uid": "x"}'},
        {"reply": b"[" * 8000},
        {"reply": b"no json"},
        {"reply": b'["rest"]'},
    ],
    ids=["never reads", "refuses without end", "nests", "no json", "no object"],
)
def test_a_hostile_sidecar_keeps_no_other_pool_from_its_sockets(node, hostile):
    bad = node.server(sidecar("bad", OTHER), **hostile)
    for number in range(5 if "reply" in hostile else 40):  # the agent waits to send before it reads replies
        node.kubelet.add(pod(f"theirs-{number}", pool=OTHER))
    wait_for(lambda: bad.connections, "it is connected")
    good = node.server(sidecar("good"))
    node.kubelet.add(pod("one"))
    wait_for(lambda: "one" in good.got, "the other pool has its pod", 20)
    if "reply" in hostile:
        wait_for(lambda: bad.sent > 5000, "the agent still reads: no buffer holds that many", 30)
    assert "Traceback" not in node.log()


def test_a_pod_of_another_namespace_cannot_pose_as_a_sidecar_of_the_pool(node):
    posing = sidecar("posing")
    posing["metadata"]["namespace"] = "team-b"
    server = node.server(posing)
    path = node.kubelet.add(pod("one"))
    wait_for(lambda: server.connections, "it is a sidecar of a pool of its own namespace")
    real = node.server(sidecar("real"))
    wait_for(lambda: "one" in real.got, "the pool has its pod")
    assert path.is_socket()
    assert server.got == {}


def test_a_link_in_a_sidecars_volume_is_not_followed(node):
    victim = sidecar("victim", OTHER)
    server = node.server(victim)
    wait_for(lambda: server.connections == 1, "connected")
    hostile = node.kubelet.handoff(sidecar("hostile"))
    hostile.symlink_to(hostile.parents[4] / victim["metadata"]["uid"] / hostile.relative_to(hostile.parents[3]))
    assert hostile.is_socket(), "the link leads to the other sidecar"
    node.kubelet.add(pod("one"))
    real = node.server(sidecar("later"))
    wait_for(lambda: "one" in real.got, "the agent still works")
    assert (server.connections, server.got) == (1, {})


@pytest.mark.skipif(os.geteuid() != 0, reason="another user is needed, which only root can become")
def test_a_listener_of_another_user_than_the_sidecars_gets_no_socket(node):
    path = node.kubelet.handoff(sidecar("a"))
    code = (
        "import os, socket, sys; os.chdir(sys.argv[1]); os.setuid(65533); "
        "s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); s.bind('handoff.sock'); s.listen(); "
        "print('up', flush=True); c = s.accept()[0]; print(len(c.recv(100)), flush=True); sys.stdin.read()"
    )
    os.chmod(path.parent, 0o777)
    for parent in path.parents[1:]:
        if str(parent) != "/":
            os.chmod(parent, parent.stat().st_mode | 0o011)
    node.kubelet.add(pod("one"))
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path.parent)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as listening:
        assert listening.stdout.readline() == "up\n"
        os.chmod(path, 0o666)
        assert listening.stdout.readline() == "0\n"
        listening.stdin.close()
    wait_for(lambda: "user 65533 listens in the sidecar of pool kvpool/test, expected 0" in node.log(), "it says so")


def test_sidecars_of_older_releases_are_left_to_their_own_rendezvous(node):
    old = sidecar("old")
    del old["metadata"]["labels"]["kvpool.dev/sockets"]
    left = node.server(old)
    path = node.kubelet.add(pod("one"))
    new = node.server(sidecar("new", OTHER))
    node.kubelet.add(pod("two", pool=OTHER))
    wait_for(lambda: "two" in new.got, "the agent works")
    assert left.connections == 0
    assert not path.exists()


def test_a_sidecar_that_is_being_deleted_loses_the_agent_and_the_next_one_gets_the_pods(node):
    raw = sidecar("old")
    old = node.server(raw)
    path = node.kubelet.add(pod("one"))
    wait_for(lambda: "one" in old.got, "served")
    raw["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    node.kubelet.publish()
    wait_for(lambda: not _listens(path), "nothing listens there")
    new = node.server(sidecar("new"))
    wait_for(lambda: "one" in new.got and _listens(path), "the next one has it")


def _listens(path: Path) -> bool:
    fd = os.open(path.parent, os.O_PATH)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.connect(f"/proc/self/fd/{fd}/{path.name}")
        return True
    except OSError:
        return False
    finally:
        os.close(fd)


@pytest.mark.parametrize(
    "change",
    [
        {"ownerReferences": []},
        {"ownerReferences": "DaemonSet"},
        {"ownerReferences": [{"kind": "DaemonSet", "name": "test-sidecar"}]},
        {"ownerReferences": [{"kind": "DaemonSet", "name": "other-sidecar", "controller": True}]},
        {"ownerReferences": [{"kind": "ReplicaSet", "name": "test-sidecar", "controller": True}]},
        {"labels": {"kvpool.dev/pool": "test"}},
        {"labels": None},
        {"namespace": 7},
        {"deletionTimestamp": "2026-01-01T00:00:00Z"},
    ],
)
def test_what_is_no_sidecar_of_the_pool_is_left_out(change):
    uid, parsed = parse_sidecar(sidecar("a"))
    assert parsed.pool == POOL
    assert parse_sidecar(sidecar("a", metadata=change)) == (uid, None)


@pytest.mark.parametrize("containers", [None, [], [{"name": "server"}], [{"name": "x", "securityContext": {}}], [7]])
def test_a_sidecar_whose_user_is_not_known_is_left_out(containers):
    raw = sidecar("a")
    raw["spec"]["containers"] = containers
    assert parse_sidecar(raw)[1] is None


def test_an_engines_pod_is_no_sidecar_and_a_sidecar_no_engines_pod():
    assert parse_sidecar(pod("x"))[1] is None
    assert parse_pod(sidecar("x"))[1] is None
