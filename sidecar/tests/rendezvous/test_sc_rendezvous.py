"""Each engine pod gets its own socket, whatever it or its neighbours have made of their volumes. Real processes."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import pytest
from sc_kubelet import Kubelet, pod, sidecar
from sc_nodes import Process, wait_for
from sc_raw import GoneError, Raw, block_id, payload

from kvpool.protocol import peer_wire, wire
from kvpool_sidecar.rendezvous.pods import parse_pod
from kvpool_sidecar.rendezvous.socket_path import SOCKET, STREAM_SOCKET


class Setup:
    """A sidecar's server, and a node agent."""

    def __init__(self, cluster, pods_dir: Path, **pool) -> None:
        self.cluster = cluster(index=False)
        home = self.cluster.directory
        self.kubelet = Kubelet(pods_dir, home)
        self.sidecar = sidecar("server")
        self.handoff = self.kubelet.handoff(self.sidecar)
        self.node = self.cluster.node("a", tenants=(), arguments=[f"--rendezvous-socket={self.handoff}"], **pool)
        arguments = [f"--pods-dir={pods_dir}", f"--pods-file={self.kubelet.file}", "--node=n"]
        self.agent = Process(home / "agent.log", ["agent", *arguments])
        self.cluster.run(self.agent)

    def connect(self, path: Path, timeout: float = 10.0) -> Raw:
        def attempt():
            with contextlib.suppress(OSError, GoneError):
                return Raw(f"/proc/self/fd/{opened}/kv.sock")
            return None

        def there():
            return path.is_socket()

        wait_for(there, f"{path} is there", timeout)
        opened = os.open(path.parent, os.O_PATH)  # the path is longer than an address holds
        try:
            return wait_for(attempt, f"{path} answers", timeout)
        finally:
            os.close(opened)


@pytest.fixture
def setup(cluster, tmp_path):
    pods_dir = tmp_path / "kubelet" / "pods"
    pods_dir.mkdir(parents=True, mode=0o750)
    return Setup(cluster, pods_dir)


def test_a_pod_gets_a_socket_soon_after_its_volume_and_its_namespace_is_its_tenant(setup):
    one, two = pod("one", "team-a"), pod("two", "team-b")
    first = setup.kubelet.add(one)
    with setup.connect(first) as raw:
        assert raw.put({block_id(1): payload(1)}) == [wire.CommitStatus.STORED]
    second = setup.kubelet.add(two, volume=False)
    time.sleep(0.3)
    started = time.monotonic()
    setup.kubelet.volume(two).mkdir(parents=True)
    with setup.connect(second) as raw:
        assert time.monotonic() - started < 1.5
        assert raw.lookup([block_id(1)]) == [0]
    with setup.connect(setup.kubelet.add(pod("three", "team-a"))) as raw:
        assert raw.get([block_id(1)]) == [payload(1)]
    assert first.stat().st_mode & 0o777 == 0o666
    assert STREAM_SOCKET == SOCKET + peer_wire.STREAM_SUFFIX
    streams = first.with_name(STREAM_SOCKET)
    assert streams.is_socket()
    assert streams.stat().st_mode & 0o777 == 0o666


def test_pods_that_are_not_ours_get_nothing(setup):
    others = [
        pod("other-pool", pool="kvpool/other"),
        pod("no-pool", metadata={"annotations": {}}),
        pod("ended", status={"phase": "Succeeded"}),
        pod("ending", metadata={"deletionTimestamp": "2026-01-01T00:00:00Z"}),
    ]
    sockets = [setup.kubelet.add(raw) for raw in others]
    setup.connect(setup.kubelet.add(pod("ours"))).close()
    assert not any(path.exists() for path in sockets)


def test_a_pod_that_has_ended_is_forgotten(setup):
    raw = pod("one")
    path = setup.kubelet.add(raw)
    setup.connect(path).close()
    assert setup.node.status()["pods"] == 1
    setup.kubelet.remove(raw)
    wait_for(lambda: setup.node.status()["pods"] == 0, "the server knows")


def test_a_pod_that_is_told_to_end_is_let_go_when_its_containers_have_ended(setup):
    """So that the kubelet can unmount its volume."""
    raw = pod("one")
    path = setup.kubelet.add(raw)
    setup.connect(path).close()
    raw["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    raw["status"]["containerStatuses"] = [{"state": {"running": {}}}]
    setup.kubelet.publish()
    setup.connect(path).close()
    raw["status"]["containerStatuses"] = [{"state": {"terminated": {}}}]
    setup.kubelet.publish()
    wait_for(lambda: not path.exists(), "taken away")
    wait_for(lambda: setup.node.status()["pods"] == 0, "forgotten")


def test_the_server_restarts_and_pods_keep_their_sockets(setup):
    paths = [setup.kubelet.add(pod(f"p{n}")) for n in range(3)]
    for path in paths:
        setup.connect(path).close()
    inodes = [path.stat().st_ino for path in paths]
    for how in (signal.SIGTERM, signal.SIGKILL):
        setup.node.stop(how)
        waiting = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # while no one serves: no refusal
        opened = os.open(paths[0].parent, os.O_PATH)
        waiting.connect(f"/proc/self/fd/{opened}/kv.sock")
        os.close(opened)
        setup.node.start()
        setup.node.ready()
        for path in paths:
            with setup.connect(path) as raw:
                raw.lookup([block_id(1)])
        waiting.close()
    assert [path.stat().st_ino for path in paths] == inodes


def test_the_agent_restarts_and_live_connections_go_on(setup):
    paths = [setup.kubelet.add(pod(f"p{n}")) for n in range(2)]
    gone = pod("gone")
    setup.connect(setup.kubelet.add(gone)).close()
    live = setup.connect(paths[0])
    setup.agent.kill()
    live.lookup([block_id(1)])
    setup.connect(paths[1]).close()  # and new ones are taken by the sockets that the server has
    setup.kubelet.remove(gone)
    setup.agent.start()
    wait_for(lambda: setup.node.status()["pods"] == 2, "the server forgets who went meanwhile")
    live.lookup([block_id(1)])
    live.close()
    setup.connect(paths[0]).close()


def test_the_connections_of_a_pod_hold_across_a_restart_of_the_agent(setup):
    path = setup.kubelet.add(pod("one"))
    held = [setup.connect(path) for _ in range(32)]
    inode = path.stat().st_ino
    setup.agent.kill()
    setup.agent.start()
    wait_for(lambda: path.exists() and path.stat().st_ino != inode, "a new socket")
    opened = os.open(path.parent, os.O_PATH)
    wait_for(lambda: setup.node.status()["pods"] == 1, "handed over")
    with pytest.raises((GoneError, TimeoutError)):
        Raw(f"/proc/self/fd/{opened}/kv.sock", timeout=2)
    os.close(opened)
    for raw in held:
        raw.close()


HOSTILE = {
    "directory": lambda v: (v / "kv.sock").mkdir(),
    "full directory": lambda v: ((v / "kv.sock").mkdir(), (v / "kv.sock" / "x").write_text("x")),
    "file": lambda v: (v / "kv.sock").write_text("x"),
    "link to a file": lambda v: (v / "kv.sock").symlink_to("/etc/passwd"),
    "link to nowhere": lambda v: (v / "kv.sock").symlink_to("/nowhere/at/all"),
    "pipe": lambda v: os.mkfifo(v / "kv.sock"),
    "own socket": lambda v: own_socket(v),
}


def own_socket(volume: Path) -> None:
    opened = os.open(volume, os.O_PATH)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.bind(f"/proc/self/fd/{opened}/kv.sock")
    os.close(opened)


def test_hostile_volumes_harm_nobody_and_are_served_where_that_is_possible(setup):
    before = Path("/etc/passwd").stat()
    paths = []
    for n, (name, make) in enumerate(HOSTILE.items()):
        raw = pod(f"hostile-{n}")
        volume = setup.kubelet.volume(raw)
        volume.mkdir(parents=True)
        make(volume)
        paths.append(setup.kubelet.add(raw, volume=False))
        assert name
    for path in paths:
        setup.connect(path).close()
    after = Path("/etc/passwd").stat()
    assert (before.st_mode, before.st_ino, before.st_mtime) == (after.st_mode, after.st_ino, after.st_mtime)


@pytest.mark.parametrize("what", ["link to another pod", "link to the host", "file", "gone inside"])
def test_a_volume_that_is_no_directory_gets_nothing_and_stops_nobody(setup, what):
    victim = pod("victim", "team-b")
    victim_path = setup.kubelet.add(victim, volume=False)
    setup.kubelet.volume(victim).mkdir(parents=True)
    raw = pod("hostile")
    volume = setup.kubelet.volume(raw)
    volume.parent.mkdir(parents=True)
    host = setup.cluster.directory / "host"
    host.mkdir()
    if what == "link to another pod":
        volume.symlink_to(setup.kubelet.volume(victim))
    elif what == "link to the host":
        volume.symlink_to(host)
    elif what == "file":
        volume.write_text("x")
    else:
        volume.parent.rmdir()
        volume.parent.symlink_to(host)
        (host / "kvpool").mkdir()
    setup.kubelet.add(raw, volume=False)
    with setup.connect(victim_path) as connected:
        connected.lookup([block_id(1)])
    time.sleep(0.5)
    assert setup.node.status()["pods"] == 1
    assert not [p for p in host.rglob("*") if p.is_socket()]
    setup.connect(setup.kubelet.add(pod("later"))).close()


@pytest.mark.parametrize("uid", ["../../../tmp/x", "..", "", "a/b", "A" * 36, None, 5])
def test_a_uid_that_is_none_is_never_part_of_a_path(uid):
    assert parse_pod(pod("x", uid="") | {"metadata": {"uid": uid}}) == ("", None)


@pytest.mark.parametrize("raw", [None, [], {}, {"metadata": None}, {"metadata": []}, {"metadata": {"uid": {}}}])
def test_what_is_no_pod_is_left_out(raw):
    assert parse_pod(raw) == ("", None)


def test_a_socket_that_the_pod_removes_or_replaces_is_put_back(setup):
    raw = pod("one")
    path = setup.kubelet.add(raw)
    setup.connect(path).close()
    path.unlink()
    setup.connect(path).close()
    path.unlink()
    path.mkdir()
    setup.connect(path).close()
    streams = path.with_name(STREAM_SOCKET)
    streams.unlink()
    wait_for(streams.is_socket, "the stream socket is put back")
    setup.connect(path).close()
    shutil.rmtree(setup.kubelet.volume(raw))  # a volume that was made again, as after a reboot
    setup.kubelet.volume(raw).mkdir()
    setup.connect(path).close()


def test_a_pod_that_fights_over_the_socket_does_not_keep_others_from_theirs(setup):
    path = setup.kubelet.add(pod("hostile"))
    wait_for(path.is_socket, "served")
    stop = threading.Event()

    def fight():
        while not stop.wait(0.001):
            with contextlib.suppress(OSError):
                path.unlink()
                path.mkdir()
            with contextlib.suppress(OSError):
                path.rmdir()

    thread = threading.Thread(target=fight)
    thread.start()
    try:
        for n in range(3):
            started = time.monotonic()
            setup.connect(setup.kubelet.add(pod(f"p{n}"))).close()
            assert time.monotonic() - started < 3
    finally:
        stop.set()
        thread.join()


def test_a_namespace_that_the_pool_does_not_serve_gets_no_socket(cluster, tmp_path):
    pods_dir = tmp_path / "pods"
    pods_dir.mkdir()
    setup = Setup(cluster, pods_dir, allowed_namespaces=("team-a",))
    stranger = setup.kubelet.add(pod("stranger", "team-b"))
    setup.connect(setup.kubelet.add(pod("ours", "team-a"))).close()
    wait_for(lambda: not stranger.exists(), "its socket was taken away")
    assert setup.node.status()["pods"] == 1


def test_a_volume_in_memory_is_served_like_any_other(cluster):
    """`medium: Memory`: the directory is a tmpfs."""
    pods_dir = Path("/dev/shm") / f"kvpool-test-{os.getpid()}"
    pods_dir.mkdir()
    try:
        setup = Setup(cluster, pods_dir)
        with setup.connect(setup.kubelet.add(pod("one"))) as raw:
            assert raw.put({block_id(1): payload(1)}) == [wire.CommitStatus.STORED]
        for process in (setup.agent, setup.node):
            process.stop()
    finally:
        shutil.rmtree(pods_dir)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a tmpfs for a pod needs root")
def test_a_volume_mounted_later_is_seen_and_can_be_unmounted_once_its_socket_is_taken_away(tmp_path):
    """As on a node: the agent sees new mounts below the kubelet's directory (HostToContainer), and pins none."""
    uid = str(uuid.uuid4())
    volume = tmp_path / uid / "volumes/kubernetes.io~empty-dir/kvpool"
    script = f"""
set -e
mount --make-rprivate /
mount -t tmpfs none {tmp_path}; mount --make-shared {tmp_path}; mkdir -p {volume}
exec {sys.executable} - <<'END'
import subprocess, sys, os
child = subprocess.Popen(
    ["unshare", "-m", "--propagation", "slave", sys.executable, "-c", '''
import os, sys
from kvpool_sidecar.rendezvous.socket_path import is_in_place, place_socket, remove_socket
fd = os.open({str(tmp_path)!r}, os.O_RDONLY)
print("started", flush=True)
sys.stdin.readline()
placed = place_socket(fd, {uid!r})
print(is_in_place(fd, {uid!r}, placed), flush=True)
sys.stdin.readline()
remove_socket(fd, {uid!r}, placed)
print("taken", flush=True)
sys.stdin.readline()
'''], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
def step():
    child.stdin.write("go" + chr(10)); child.stdin.flush(); return child.stdout.readline().strip()
assert child.stdout.readline().strip() == "started"
subprocess.run(["mount", "-t", "tmpfs", "none", {str(volume)!r}], check=True)
assert step() == "True"
assert sorted(os.listdir({str(volume)!r})) == ["kv.sock", "kv.sock.stream"]
assert step() == "taken"
assert os.listdir({str(volume)!r}) == []
subprocess.run(["umount", {str(volume)!r}], check=True)
print("unmounted")
child.stdin.close(); child.wait()
END
"""
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "unmounted\n", "")


def test_only_root_and_the_server_itself_may_hand_over_sockets(setup):
    if os.geteuid() != 0:
        pytest.skip("another user is needed, which only root can become")
    code = (
        "import os, socket, sys; os.chdir(sys.argv[1]); os.setuid(65533);"
        "s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET);"
        "s.connect(sys.argv[2]); s.settimeout(5); print(len(s.recv(10)))"
    )
    os.chmod(setup.handoff.parent, 0o755)
    for parent in setup.handoff.parents:
        if parent != Path("/"):
            os.chmod(parent, parent.stat().st_mode | 0o011)
    done = subprocess.run(
        [sys.executable, "-c", code, str(setup.handoff.parent), setup.handoff.name],
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert done.stdout == "0\n", done.stderr
    setup.connect(setup.kubelet.add(pod("one"))).close()


@pytest.mark.parametrize(
    "message",
    [
        b"no json",
        b"[]",
        b'{"op": "add"}',
        b'{"op": "fly"}',
        b'{"op": "add", "uid": "u", "namespace": "../x", "pod": "p", "service_account": "s"}',
        b'{"op": "add", "uid": 5, "namespace": "n", "pod": "p", "service_account": "s"}',
        b"x" * 5000,
    ],
)
@pytest.mark.parametrize("attached", ["nothing", "pipe", "unconnected"])
def test_odd_messages_of_the_agent_are_left_out(handing, message, attached):
    server, sock = handing
    fds = []
    if attached == "pipe":
        fds = list(os.pipe())
    elif attached == "unconnected":
        fds = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET).detach()]
    socket.send_fds(sock, [message], fds)
    for fd in fds:
        os.close(fd)
    sock.sendall(b'{"op": "synced"}')
    wait_for(lambda: server.synced, "it goes on")
    assert server.added == []


@pytest.fixture
def handing(tmp_path):
    from kvpool_sidecar.serving.socket_handoff import SocketHandoff

    class Server:
        def __init__(self):
            self.added, self.synced = [], []
            self.handoff = SocketHandoff(str(tmp_path / "h"), self)

        def admit(self, *pod):
            self.added.append(pod)

        def remove(self, uid):
            pass

        def retain(self, uids):
            self.synced.append(uids)

    server = Server()
    server.handoff.start()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.connect(str(tmp_path / "h"))
        yield server, sock
    server.handoff.stop()
