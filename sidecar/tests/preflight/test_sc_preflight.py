"""A look at a node: real directories, a real Redis, a real S3 server; what this machine has not is played."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import urllib.request
from typing import NamedTuple

import pytest
from sc_nodes import MIB, fresh_address, wait_for
from sc_redis import ACL, Servers

from kvpool import config
from kvpool.errors import ProtocolError, RetryableError
from kvpool_sidecar.admin.context import Context
from kvpool_sidecar.admin.preflight import Preflight
from kvpool_sidecar.preflight import drive, index, kernel, mounts, rdma, shared, speed
from kvpool_sidecar.preflight.finding import Level, Report, failed, fine, warned
from kvpool_sidecar.preflight.report import format_report
from kvpool_sidecar.preflight.run import PreflightSettings, run
from kvpool_sidecar.preflight.serve import serve_preflight
from kvpool_sidecar.storage import layout as names
from kvpool_sidecar.storage.local.directory import TierDirectory

UID = "pool-uid"


def tier(path, capacity=MIB, **kw):
    return config.LocalTier("nvme", str(path), capacity, **{"reserve_free_percent": 0, **kw})


def look(path, *, node_files=(), max_s=0.1, **kw):
    found = drive.check_drive(tier(path, **kw), UID, expected_mb_s=1, node_files=node_files, max_s=max_s)
    return {f.check: f for f in found}


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "tier"
    path.mkdir(mode=0o700)
    return path


# -- a drive


def test_a_good_drive_is_measured_and_nothing_stays(folder):
    found = look(folder)
    assert {f.level for f in found.values()} == {Level.OK}, found
    assert {"Filesystem", "LargeFolios", "Space", "Speed"} == set(found)
    assert found["Speed"].values["write_mb_s"] > 0
    assert found["Speed"].values["read_mb_s"] > 0
    assert os.listdir(folder) == []


@pytest.mark.parametrize(
    ("asked", "level"), [("Require", Level.FAIL), ("Prefer", Level.WARN), ("Ignore", None)], ids=str
)
def test_a_directory_on_the_nodes_own_file_system(folder, asked, level):
    found = look(folder, node_files=(str(folder.parent),), dedicated_filesystem=asked)
    assert (found["RootFilesystem"].level if level else "RootFilesystem" in found) == (level or False)


def test_memory_is_no_drive():
    here = f"/dev/shm/kvpool-preflight-{os.getpid()}"
    os.mkdir(here, 0o700)
    try:
        found = look(here)
        assert found["Filesystem"].level is Level.WARN
        assert "memory" in found["Filesystem"].message
    finally:
        shutil.rmtree(here)


def test_a_directory_of_somebody_else_fails_and_stays_as_it_is(folder):
    (folder / "thesis.tex").write_text("x")
    found = look(folder)
    assert list(found) == ["Directory"]
    assert found["Directory"].level is Level.FAIL
    assert "'thesis.tex'" in found["Directory"].message
    assert os.listdir(folder) == ["thesis.tex"]


def test_a_directory_of_another_pool_fails(folder):
    fd = os.open(folder, os.O_RDONLY)
    names.claim_directory(fd, "their-uid", str(folder))
    os.close(fd)
    assert "their-uid" in look(folder)["Directory"].message


def test_a_directory_that_others_may_write_to_or_that_is_not_there_fails(folder):
    folder.chmod(0o777)
    assert "others may write" in look(folder)["Directory"].message
    assert "No such file" in look(folder / "nothing")["Directory"].message


def test_no_room_fails_and_too_little_room_for_the_capacity_is_told(folder):
    assert look(folder, reserve_free_bytes=1 << 60)["Space"].level is Level.FAIL
    found = look(folder, capacity=1 << 60)["Space"]
    assert found.level is Level.WARN
    assert "1024Pi" not in found.message
    assert found.values["free_bytes"] > 0


def test_a_drive_that_a_sidecar_uses_can_be_looked_at(folder):
    used = TierDirectory("nvme", str(folder), UID, read_path=None, use_tmpfile=True)
    before = sorted(os.listdir(folder))
    assert {f.level for f in look(folder).values()} == {Level.OK}
    assert sorted(os.listdir(folder)) == before
    used.close()


def test_a_drive_that_returns_errors_fails(folder, monkeypatch):
    def broken(*_args, **_kw):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(speed, "measure", broken)
    assert look(folder)["Drive"].level is Level.FAIL


def test_a_slow_drive_is_told(folder, monkeypatch):
    monkeypatch.setattr(speed, "measure", lambda *_a, **_k: speed.Speed(90.0, 100.0, 64 * MIB, direct=True))
    found = {f.check: f for f in drive.check_drive(tier(folder), UID, expected_mb_s=1000, node_files=())}
    assert found["Speed"].level is Level.WARN
    assert "expectedBandwidth" in found["Speed"].advice


def test_without_unnamed_files_and_direct_io_it_is_told(folder, monkeypatch):
    monkeypatch.setattr(os, "O_TMPFILE", os.O_DIRECTORY)  # what an old kernel takes it for: EISDIR
    monkeypatch.setattr(speed, "takes_direct_io", lambda _fd: False)
    found = look(folder)
    assert found["UnnamedFiles"].level is Level.WARN
    assert found["DirectIO"].level is Level.WARN
    assert found["Speed"].values["measured_bytes"] > 0
    assert os.listdir(folder) == []


def test_measuring_keeps_to_its_bounds(folder):
    with drive.scratch_file(os.open(folder, os.O_RDONLY)) as (file, _):
        found = speed.measure(file, direct=False, max_bytes=9 * MIB, max_s=60)
        assert found.written == 8 * MIB  # whole chunks
        assert os.fstat(file).st_size == 8 * MIB


def loop_device(tmp_path):
    """A small ext4 of its own, mounted at the path that is given; None where that is not allowed."""
    image, there = tmp_path / "image", tmp_path / "mounted"
    there.mkdir()
    with image.open("wb") as file:
        file.truncate(48 * MIB)
    if not shutil.which("mkfs.ext4") or os.geteuid() != 0:
        return None
    subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True, capture_output=True)
    done = subprocess.run(["mount", "-o", "loop", str(image), str(there)], check=False, capture_output=True)
    return there if done.returncode == 0 else None


def test_a_drive_of_its_own_that_is_nearly_full(tmp_path):
    there = loop_device(tmp_path)
    if there is None:
        pytest.skip("mounting a loop device is not allowed here (it needs root, mkfs.ext4 and loop devices)")
    try:
        there.chmod(0o700)
        found = {
            f.check: f for f in drive.check_drive(tier(there), UID, expected_mb_s=1, max_s=0.1)
        }  # the real files of the node: this is another device
        assert found["Filesystem"].message.startswith("ext4 on /dev/loop")
        assert found["Space"].level is Level.FAIL  # 48 MiB are no drive
        assert 0 < found["Speed"].values["measured_bytes"] <= 12 * MIB  # a quarter of what is free
        fd = os.open(there, os.O_RDONLY)
        with drive.scratch_file(fd) as (file, _):
            full = speed.measure(file, direct=True, max_bytes=256 * MIB, max_s=5)
        os.close(fd)
        assert 16 * MIB < full.written < 48 * MIB
        assert set(os.listdir(there)) == {"lost+found"}
    finally:
        subprocess.run(["umount", str(there)], check=True)


def test_what_mountinfo_says():
    text = (
        "22 1 259:1 / / rw,relatime - ext4 /dev/nvme0n1p1 rw\n"
        "40 22 0:45 / /tiers/cold rw shared:9 - nfs4 10.0.0.9:/kv rw,vers=4.2,hard,proto=rdma\n"
        "41 22 0:46 / /tiers/fuse rw - fuse.juicefs JuiceFS:kv rw\n"
        "broken line\n"
    )
    nfs = mounts.parse(text, "0:45")
    assert nfs == ("nfs4", "10.0.0.9:/kv", ("rw", "vers=4.2", "hard", "proto=rdma"))
    assert nfs.is_network
    assert mounts.parse(text, "0:46").is_network
    assert not mounts.parse(text, "259:1").is_network
    assert mounts.parse(text, "8:1") is None


# -- the shared tier


def shared_look(path, **kw):
    kw.setdefault("node_files", ())
    found = shared.check_directory(config.SharedTier("cold", str(path)), UID, max_s=0.05, **kw)
    return {f.check: f for f in found}


def test_a_shared_directory_is_tried_and_timed(folder):
    nfs = mounts.Mount("nfs4", "10.0.0.9:/kv", ("soft", "proto=rdma"))
    found = shared_look(folder, mount=lambda _fd: nfs)
    assert {f.level for f in found.values()} == {Level.OK}
    assert "over RDMA" in found["SharedFilesystem"].message
    assert found["RoundTrip"].values["round_trip_ms"] > 0
    assert os.listdir(folder) == []


def test_a_hard_mount_and_a_directory_that_is_no_mount_are_told(folder):
    hard = mounts.Mount("nfs4", "10.0.0.9:/kv", ("hard",))
    assert shared_look(folder, mount=lambda _fd: hard)["HardMount"].level is Level.WARN
    assert shared_look(folder, node_files=(str(folder),))["NotMounted"].level is Level.WARN
    assert "NotShared" in shared_look(folder, mount=lambda _fd: mounts.Mount("ext4", "/dev/sda1", ()))


def test_a_shared_directory_that_is_away_read_only_or_somebody_elses_fails(folder, monkeypatch):
    assert shared_look(folder / "nothing")["SharedDirectory"].level is Level.FAIL
    (folder / "photos").mkdir()
    assert "'photos'" in shared_look(folder)["SharedDirectory"].message
    (folder / "photos").rmdir()
    real = os.open

    def refuses(path, flags, *args, **kw):
        if flags & os.O_CREAT:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real(path, flags, *args, **kw)

    monkeypatch.setattr(os, "open", refuses)
    assert "Read-only" in shared_look(folder)["SharedDirectory"].message


# -- an index of one's own


def index_look(url, password=""):
    return {f.check: f for f in index.check_index(config.IndexConfig(url), lambda: (password,), {})}


def test_an_index_is_tried(tmp_path, monkeypatch):
    with Servers(tmp_path) as servers:
        server = servers.make("redis", config=f"user kvpool {ACL.format(password='right')}\n")
        url = f"redis://kvpool@{server.endpoint}/0"
        found = index_look(url, "right")
        assert {f.level for f in found.values()} == {Level.OK}
        assert server.client.dbsize() == 0
        monkeypatch.setattr(index, "MIN_VERSION", (99,))
        assert index_look(url, "right")["IndexVersion"].level is Level.FAIL
        wrong = index_look(url, "a wrong password")["Index"]
        assert wrong.level is Level.FAIL
        assert "password" in wrong.advice
        assert "a wrong password" not in json.dumps(wrong.dump())
        server.client.execute_command("ACL", "SETUSER", "kvpool", "-set")
        assert "docs/reference/prefix-index.md" in index_look(url, "right")["Index"].advice
        server.client.execute_command("ACL", "SETUSER", "kvpool", "+set", "-info")
        assert index_look(url, "right")["IndexVersion"].level is Level.WARN
    assert index_look(f"redis://{fresh_address()}:1/0")["Index"].level is Level.FAIL


def test_versions():
    assert index.version_of(b"# Server\r\nredis_version:7.2.4\r\nvalkey_version:8.0\r\n") == (7, 2, 4)
    assert index.version_of(b"nothing") == ()


# -- RDMA and the kernel


def device(sys, state="4: ACTIVE", gids=None, link="Ethernet"):
    """`gids`: network device by GID. What /sys would show of one device with one port."""
    port = sys / "class" / "infiniband" / "mlx5_0" / "ports" / "1"
    (port / "gid_attrs" / "ndevs").mkdir(parents=True)
    (port / "gids").mkdir()
    (port / "state").write_text(state + "\n")
    (port / "link_layer").write_text(link + "\n")
    for n, (gid, netdev) in enumerate((gids or {}).items()):
        (port / "gids" / str(n)).write_text(gid + "\n")
        if netdev:
            (port / "gid_attrs" / "ndevs" / str(n)).write_text(netdev + "\n")


def rdma_look(sys, protocol="RDMA", here=(True, True), memlock=1 << 40, **kw):
    peer = config.PeerConfig(protocol=protocol, **kw)
    found = rdma.check_rdma(peer, sys=str(sys), here=here, memlock=memlock, interfaces=frozenset({"eth0", "net1"}))
    return {f.check: f for f in found}


GID, NONE = "fe80:0000:0000:0000:0215:5dff:fe00:0001", "0000:0000:0000:0000:0000:0000:0000:0000"


def test_rdma_with_a_gid_of_this_pod(tmp_path):
    device(tmp_path, gids={NONE: "", GID: "net1"})
    found = rdma_look(tmp_path)
    assert found["Rdma"].level is Level.OK
    assert found["Rdma"].values["gids"] == 1


@pytest.mark.parametrize(("protocol", "level"), [("RDMA", Level.FAIL), ("Auto", Level.WARN)])
def test_a_device_whose_gids_are_all_of_other_namespaces(tmp_path, protocol, level):
    device(tmp_path, gids={NONE: "", GID: "", "fe80::2": "eth7"})
    assert rdma_look(tmp_path, protocol)["GIDTableEmpty"].level is level


def test_infiniband_proper_needs_no_network_device(tmp_path):
    device(tmp_path, gids={GID: ""}, link="InfiniBand")
    assert rdma_look(tmp_path)["Rdma"].level is Level.OK


def test_a_port_that_is_down_little_memory_and_a_missing_package(tmp_path):
    device(tmp_path, state="1: DOWN", gids={GID: "eth0"})
    found = rdma_look(tmp_path, here=(False, True), memlock=64 << 10)
    assert {c for c, f in found.items() if f.level is Level.FAIL} == {"RdmaPort", "MemlockTooLow", "RdmaPackage"}


def test_no_device_is_a_failure_only_where_rdma_is_asked_for(tmp_path):
    assert rdma_look(tmp_path, "RDMA", (True, False))["RdmaDevice"].level is Level.FAIL
    assert rdma_look(tmp_path, "Auto", (True, False))["RdmaDevice"].level is Level.OK
    assert rdma_look(tmp_path, "TCP", (True, False)) == {}
    assert rdma_look(tmp_path, "RDMA", (True, False), encryption="Always") == {}


def test_the_kernel_has_what_is_needed_and_what_it_has_not_is_named():
    assert [f.level for f in kernel.check_kernel()] == [Level.OK]

    def sealed_memory():
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    (found, *_) = kernel.check_kernel((kernel.peer_credentials, sealed_memory))
    assert found.level is Level.FAIL
    assert "sealed memory: Function not implemented" in found.message
    (found,) = kernel.check_kernel(has_openat2=lambda: False)
    assert found.level is Level.WARN


# -- all of it


def settings(folder, **kw):
    value = config.PoolConfig(
        pool="test", namespace="kvpool", uid=UID, local=(tier(folder),), index=config.IndexConfig(""), **kw
    )
    return PreflightSettings(value, "node-a")


def test_tiers_on_one_device_are_told(folder):
    other = folder.parent / "other"
    other.mkdir(mode=0o700)
    both = (tier(folder), config.LocalTier("second", str(other), MIB, reserve_free_percent=0))
    value = config.PoolConfig(pool="t", namespace="n", uid=UID, local=both, index=config.IndexConfig(""))
    report = run(PreflightSettings(value, "node-a"), measure=False)
    assert "nvme, second" in next(f for f in report.findings if f.check == "SameDevice").message
    assert not any(f.check == "Speed" for f in report.findings)


def test_a_look_that_hangs_holds_nobody_up_and_one_that_breaks_is_a_finding():
    ever = threading.Event()

    def broken():
        yield fine("Before", "reported")
        raise ZeroDivisionError

    looks = [
        ("Hung", lambda: [fine("Hung", "x")] * ever.wait()),
        ("Broken", broken),
        ("Good", lambda: [fine("G", "g")]),
    ]
    try:
        report = run(settings("/nowhere"), selected=looks, max_s=0.5)
    finally:
        ever.set()
    found = {f.check: f for f in report.findings}
    assert "no result within" in found["Hung"].message
    assert "ZeroDivisionError" in found["Broken"].message
    assert {"Before", "G"} <= set(found)
    assert not report.passed


def test_a_report_is_bounded_and_its_worst_comes_first():
    many = (*[fine("C", "x" * 5000)] * 200, failed("D", "y" * 5000, "z" * 5000))
    reported = Report("node", 1.0, many).dump()
    assert reported["findings"][0]["check"] == "D"
    assert len(reported["findings"]) == 64
    assert len(json.dumps(reported)) < 64 * 1024
    assert "D: y" in format_report(Report("node", 1.0, many), as_json=False)


# -- as an operation of a sidecar that runs


def test_as_an_operation_it_counts_and_what_fails_is_told(folder):
    looks = [Report("n", 1.0, (fine("A", "a"), warned("B", "b", "do"), failed("C", "c", "mend it", tier="nvme")))]
    context = Context()
    kind = Preflight(settings(folder), run_checks=lambda _settings, *, measure: looks[0])
    with pytest.raises(RetryableError, match=r"C nvme: c \(mend it\)"):
        kind({"measure": True}, context)
    assert context.counts == {"checks": 3, "warned": 1, "failed": 1}
    for params in ({}, {"measure": 1}, {"measure": True, "more": 1}):
        with pytest.raises(ProtocolError):
            kind(params, Context())


def test_as_an_operation_a_drive_is_looked_at_while_it_is_used(folder):
    used = TierDirectory("nvme", str(folder), UID, read_path=None, use_tmpfile=True)
    context = Context()
    Preflight(settings(folder))({"measure": False}, context)
    assert context.counts["failed"] == 0
    assert context.counts["checks"] >= 3
    used.close()


class Told(NamedTuple):
    code: int
    body: bytes


def ask(address, port, path):
    try:
        with urllib.request.urlopen(f"http://{address}:{port}{path}", timeout=5) as answer:
            return Told(answer.status, answer.read())
    except urllib.error.HTTPError as e:
        with e:
            return Told(e.code, e.read())
    except OSError:
        return Told(0, b"")


def test_it_is_told_over_http_and_looked_at_again_until_it_is_well(folder):
    (folder / "thesis.tex").write_text("x")
    address, stop = fresh_address(), threading.Event()
    measured = []

    def counted(wanted, *, measure=True):
        measured.append(measure)
        return run(wanted, measure=measure)

    thread = threading.Thread(
        target=serve_preflight,
        args=(settings(folder), address, 17422),
        kwargs={
            "interval_s": 0.05,
            "stop": stop,
            "run_checks": counted,
        },
    )
    thread.start()

    def reported():
        return json.loads(ask(address, 17422, "/status").body)["preflight"]

    try:
        wait_for(lambda: ask(address, 17422, "/readyz").code == 200, "there is an answer")
        assert reported()["passed"] is False
        (folder / "thesis.tex").unlink()
        wait_for(lambda: reported()["passed"], "it passes")
        assert ask(address, 17422, "/metrics").code == 200
        assert measured[0] is True
        assert not any(measured[1:])
    finally:
        stop.set()
        thread.join(10)
    assert not thread.is_alive()


def test_the_command(folder, tmp_path):
    path = tmp_path / "pool.json"
    path.write_text(config.dumps(settings(folder).config))
    command = [sys.executable, "-m", "kvpool_sidecar", "preflight", f"--config={path}", "--node=node-a"]
    good = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=60, check=False)
    assert good.returncode == 0, good.stderr
    assert json.loads(good.stdout)["node"] == "node-a"
    (folder / "thesis.tex").write_text("x")
    bad = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert bad.returncode == 1
    assert "fail  Directory nvme:" in bad.stdout
    assert "FAILED" in bad.stdout
    address = fresh_address()
    serving = subprocess.Popen([*command, "--serve", f"--address={address}", "--http-port=17422"])
    try:
        wait_for(lambda: ask(address, 17422, "/readyz").code == 200, "it serves", timeout=30)
        serving.send_signal(signal.SIGTERM)
        assert serving.wait(15) == 0
    finally:
        serving.kill()
        serving.wait()
