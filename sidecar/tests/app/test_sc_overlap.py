"""A node's new sidecar takes the drives over from the old one, and the old one takes them back if the new one ends."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import threading
import time
import urllib.error
import urllib.request
from types import SimpleNamespace

import pytest
from sc_kubelet import Kubelet, pod, sidecar
from sc_nodes import HTTP_PORT, Process, fresh_address, wait_for
from sc_raw import GoneError, Raw, block_id, payload

from kvpool.protocol import wire
from kvpool_sidecar.app import takeover as overlap
from kvpool_sidecar.storage.local.ownership import DriveOwnership

COUNT = 20


class Sidecar(Process):
    """One of several of the same node, at an address of its own."""

    def __init__(self, node, number: int, *arguments: str) -> None:
        self.address = fresh_address()
        kept = [a for a in node.arguments[3:] if not a.startswith(("--address", "--rendezvous-socket"))]
        super().__init__(node.log, [*kept, f"--address={self.address}", *arguments])

    def get(self, path: str) -> tuple[int, bytes]:
        try:
            with urllib.request.urlopen(f"http://{self.address}:{HTTP_PORT}{path}", timeout=5) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as e:
            return e.code, e.read()

    def status(self) -> dict:
        return json.loads(self.get("/status")[1])


def status(sidecar) -> dict:
    """Nothing while it changes from one phase to the next."""
    with contextlib.suppress(OSError, ValueError):
        return sidecar.status()
    return {}


def wait_until(sidecar, phase: str) -> None:
    wait_for(lambda: status(sidecar).get("phase") == phase, f"the sidecar is {phase}", 30)


@pytest.fixture
def node(cluster):
    """One that overlaps, with some blocks, known to an index."""
    node = cluster().node("a", arguments=["--allow-takeover"])
    with node.connect() as raw:
        raw.put({block_id(n): payload(n) for n in range(COUNT)})
    node.wait_announced()
    return node


def successor(node, number: int = 1, *arguments: str) -> Sidecar:
    return node.cluster.run(Sidecar(node, number, *arguments))


def has_all(node) -> bool:
    with node.connect() as raw:
        return raw.get([block_id(n) for n in range(COUNT)]) == [payload(n) for n in range(COUNT)]


def test_the_new_one_serves_and_the_old_one_waits_until_it_is_told_to_end(node):
    assert node.status()["phase"] == "Serving"
    number = node.status()["index"]["node_number"]
    new = successor(node)
    wait_until(new, "Serving")
    assert new.get("/readyz") == (200, b"ready\n")
    assert node.status() == {"node": "a", "phase": "HandedOver", "ready": False}
    assert node.get("/readyz") == b"HandedOver\n"  # the DaemonSet ends it when the new one has lasted
    assert has_all(node)
    wait_for(lambda: status(new)["index"]["node_number"] == number, "the same to its peers")
    assert node.stop(signal.SIGTERM) == 0
    assert status(new)["phase"] == "Serving"
    assert has_all(node)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_the_new_one_ends_and_the_old_one_serves_again(node, how):
    new = successor(node)
    wait_until(new, "Serving")
    new.stop(how)
    wait_until(node, "Serving")
    assert has_all(node)
    again = successor(node, 2)
    wait_until(again, "Serving")
    assert has_all(node)


def test_a_new_one_that_cannot_serve_leaves_the_drives_with_the_old_one(node):
    """Its address is taken: it finds out when it has the drives."""
    new = Sidecar(node, 1, f"--admin-port={HTTP_PORT}")
    node.cluster.run(new)
    wait_for(lambda: not new.running, "the new one gave up", 30)
    wait_until(node, "Serving")
    assert has_all(node)


def test_what_it_serves_with_is_read_again_when_the_drives_come_back(node):
    new = successor(node)
    wait_until(new, "Serving")
    _rewrite(node, generation=7)
    new.kill()
    wait_for(lambda: status(node).get("generation") == 7, "the old one serves, with the new configuration")


def _rewrite(node, **changes) -> None:
    path = node.home / "pool.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_no_write_of_the_old_one_is_lost_and_none_is_half_there(node):
    """Stores go on while the node changes hands: what was told to be stored can be read."""
    stored: list[int] = []
    stop = threading.Event()

    def store() -> None:
        n = 1000
        while not stop.is_set():
            n += 1
            with contextlib.suppress(OSError, GoneError), Raw(node.sockets["team-a"], timeout=5) as raw:
                if raw.put({block_id(n): payload(n)}) == [wire.CommitStatus.STORED]:
                    stored.append(n)

    thread = threading.Thread(target=store)
    thread.start()
    try:
        for number in range(1, 4):
            before = len(stored)
            new = successor(node, number)
            wait_until(new, "Serving")
            wait_for(lambda before=before: len(stored) > before + 5, "stores go on", 30)
            new.stop()
            wait_until(node, "Serving")
    finally:
        stop.set()
        thread.join(30)
    with node.connect() as raw:
        for n in stored:
            assert raw.get([block_id(n)]) == [payload(n)], n


# -- the node agent


def test_pods_get_their_sockets_from_whoever_serves_and_nobody_fights_over_them(cluster, tmp_path):
    pods_dir = tmp_path / "kubelet" / "pods"
    pods_dir.mkdir(parents=True, mode=0o750)
    made = cluster(index=False)
    kubelet = Kubelet(pods_dir, made.directory)
    socket_of = kubelet.add(pod("one"))
    handoffs = [kubelet.handoff(sidecar(name)) for name in ("old", "new")]
    first = made.node("a", tenants=(), arguments=["--allow-takeover", f"--rendezvous-socket={handoffs[0]}"])
    arguments = [f"--pods-dir={kubelet.pods_dir}", f"--pods-file={kubelet.file}", "--node=n"]
    made.run(Process(made.directory / "agent.log", ["agent", *arguments]))
    with _connect(socket_of) as raw:
        raw.put({block_id(1): payload(1)})
    new = successor(first, 1, f"--rendezvous-socket={handoffs[1]}")
    wait_until(new, "Serving")
    with _connect(socket_of) as raw:
        assert raw.get([block_id(1)]) == [payload(1)]
    wait_for(lambda: status(new)["pods"] == 1, "the new one has the pod")
    inode = socket_of.stat().st_ino
    later = kubelet.add(pod("two"))
    with _connect(later) as raw:
        assert raw.get([block_id(1)]) == [payload(1)]
    time.sleep(2.5)  # the agent looks once a second whether its sockets are in place
    assert socket_of.stat().st_ino == inode
    new.stop()
    wait_until(first, "Serving")
    with _connect(socket_of) as raw:
        assert raw.get([block_id(1)]) == [payload(1)]
    placed = (made.directory / "agent.log").read_text().count(": created the socket of pod")
    assert placed <= 5  # the first pod's; both of the new one; and both when the first served again


def _connect(path) -> Raw:
    def attempt():
        with contextlib.suppress(OSError, GoneError):
            folder = os.open(path.parent, os.O_PATH)  # the path is longer than an address holds
            try:
                return Raw(f"/proc/self/fd/{folder}/{path.name}", timeout=2)
            finally:
                os.close(folder)
        return None

    return wait_for(attempt, f"{path} answers", 30)


# -- alone


def tier(tmp_path, name: str = "nvme"):
    folder = tmp_path / name
    folder.mkdir()
    (folder / "POOL_ID").write_text("{}")
    return folder


def test_the_drives_are_free_when_nobody_has_any_of_them(tmp_path):
    one, two = tier(tmp_path, "one"), tier(tmp_path, "two")
    with DriveOwnership([str(one), str(two)]) as turns, (two / "POOL_ID").open() as held:
        assert turns.available
        fcntl.flock(held, fcntl.LOCK_EX)
        assert not turns.available
    with DriveOwnership([str(tmp_path / "not there")]) as turns:
        assert turns.available
        turns.request()
        assert not turns.requested


def test_a_wish_is_seen_by_others_and_ends_with_who_has_it(tmp_path):
    paths = [str(tier(tmp_path))]
    with DriveOwnership(paths) as mine, DriveOwnership(paths) as theirs:
        assert not mine.requested
        theirs.request()
        assert mine.requested
        assert not theirs.requested  # its own does not count
        theirs.close()
        assert not mine.requested


def settings(tmp_path, folder):
    config = SimpleNamespace(local=[SimpleNamespace(path=str(folder))], http_port=HTTP_PORT)
    return SimpleNamespace(config=config, address=fresh_address(), node="a", overlap=True)


@pytest.mark.parametrize("ask_s", [0.0, 600.0])
def test_who_asks_in_vain_says_that_it_is_ready_so_that_the_old_one_is_ended(tmp_path, monkeypatch, ask_s):
    monkeypatch.setattr(overlap, "_REQUEST_TIMEOUT_S", ask_s)
    folder, done = tier(tmp_path), threading.Event()
    wanted = settings(tmp_path, folder)
    found = []
    with (folder / "POOL_ID").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        thread = threading.Thread(target=lambda: found.append(overlap.await_ownership(wanted, done, back=False)))
        thread.start()
        asked = SimpleNamespace(address=wanted.address)
        wait_for(lambda: _ask(asked, "/readyz")[0], "it answers")
        assert _ask(asked, "/readyz")[0] == (200 if ask_s == 0 else 503)
        assert _ask(asked, "/healthz")[0] == 200
        assert json.loads(_ask(asked, "/status")[1]) == {"node": "a", "phase": "StandingBy", "ready": False}
        assert _ask(asked, "/v1/operations")[0] == 404
        fcntl.flock(held, fcntl.LOCK_UN)
        thread.join(30)
    assert len(found) == 1
    assert found[0] is not None
    found[0].close()


def _ask(sidecar, path: str) -> tuple[int, bytes]:
    try:
        return Sidecar.get(sidecar, path)
    except OSError:
        return 0, b""


def test_who_handed_over_waits_for_the_wish_to_end_too(tmp_path, monkeypatch):
    """A successor that starts has the wish before it has the drives."""
    monkeypatch.setattr(overlap, "_ABANDONED_S", 0.0)
    folder, done = tier(tmp_path), threading.Event()
    found = []
    with DriveOwnership([str(folder)]) as wish:
        wish.request()
        thread = threading.Thread(
            target=lambda: found.append(overlap.await_ownership(settings(tmp_path, folder), done, back=True))
        )
        thread.start()
        time.sleep(1.0)
        assert not found
    thread.join(30)
    assert found[0] is not None
    found[0].close()


def test_waiting_ends_when_the_process_is_told_to_end(tmp_path):
    folder, done = tier(tmp_path), threading.Event()
    with (folder / "POOL_ID").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        done.set()
        assert overlap.await_ownership(settings(tmp_path, folder), done, back=False) is None
