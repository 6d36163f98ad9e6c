"""A FUSE file system as the shared tier that stops to answer one operation: loads end in time, other tenants' go on."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from typing import TYPE_CHECKING

import pytest
from cl_nodes import Cluster, until

from kvpool.client import Client
from kvpool.config import ClientConfig, Deadlines
from kvpool.protocol.keys import block_id
from kvpool.protocol.wire import Tier
from kvpool_testing import fuse_server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FP = b"f" * 32
SIZE = 256 * 1024
COUNT = 24
DEADLINE_S = 0.5
PATIENCE_S = 10.0  # a hang lasts until the test ends it, so a wait for the mount would exceed this

pytestmark = pytest.mark.skipif(bool(fuse_server.unavailable()), reason=fuse_server.unavailable())


class MountedCluster(Cluster):
    """Its shared directory is a FUSE mount."""

    def __init__(self, directory: Path, mount: fuse_server.FuseMount) -> None:
        self.mount = mount
        deadlines = Deadlines(lookup_ms=500, load_min_ms=500)
        super().__init__(directory, tenants=("team", "other"), shared=True, index=False, deadlines=deadlines)


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[MountedCluster]:
    behind = tmp_path / "behind"
    behind.mkdir()
    (tmp_path / "shared").mkdir()
    mount = fuse_server.FuseMount(tmp_path / "shared", behind)
    cluster = None
    try:
        cluster = MountedCluster(tmp_path, mount)
        yield cluster
    finally:
        mount.stop()  # first: it ends every hang
        if cluster is not None:
            cluster.close()


def names_of(tenant: str) -> list[bytes]:
    return [block_id(FP, f"{tenant} {n}".encode()) for n in range(COUNT)]


def data_of(name: bytes) -> bytes:
    return name * (SIZE // len(name))


@contextlib.contextmanager
def connect(cluster: Cluster, tenant: str) -> Iterator[Client]:
    client = Client(ClientConfig(socket=cluster["a"].sockets[tenant], connect_retry_ms=100), fingerprint=FP)
    try:
        assert client.wait_connected(10)
        yield client
    finally:
        began = time.monotonic()
        client.close()
        assert time.monotonic() - began < PATIENCE_S


def put_in_shared_tier_only(cluster: MountedCluster) -> None:
    """Store the team's blocks, wait for their copies, and remove them from the drive."""
    names = names_of("team")
    with connect(cluster, "team") as team:
        assert all(r.stored for r in team.put_from(names, [data_of(name) for name in names]))
    assert cluster.shared is not None
    blocks = cluster.shared.parent / "behind" / "blocks"
    assert until(lambda: len([f for f in blocks.rglob("*") if f.is_file()]) == COUNT)
    node = cluster["a"]
    node.stop()
    shutil.rmtree(node.home / "nvme")
    (node.home / "nvme").mkdir()
    node.start()
    node.wait_ready()


@pytest.mark.parametrize("operation", ["lookup", "getattr", "open", "read", "flush", "release"])
def test_a_mount_that_hangs_in(operation: str, mounted: MountedCluster) -> None:
    put_in_shared_tier_only(mounted)
    names, others = names_of("team"), names_of("other")
    with connect(mounted, "team") as team, connect(mounted, "other") as other:
        assert all(r.stored for r in other.put_from(others, [data_of(name) for name in others]))
        assert set(team.lookup(names)) == {Tier.SHARED}
        whole = [bytearray(SIZE) for _ in names]
        assert all(r.ok for r in team.get_into(names[:4], whole[:4]))

        mounted.mount.hang(operation)
        stop = threading.Event()
        local: list[bool] = []

        def load_local() -> None:
            while not stop.is_set():
                buffers = [bytearray(SIZE) for _ in others]
                results = other.get_into(others, buffers, deadline=time.monotonic() + PATIENCE_S)
                local.append(all(r.ok and b == data_of(n) for r, b, n in zip(results, buffers, others, strict=True)))

        neighbor = threading.Thread(target=load_local)
        neighbor.start()
        try:
            for _ in range(12):
                out = [bytearray(SIZE) for _ in names]
                began = time.monotonic()
                results = team.get_into(names, out, deadline=began + DEADLINE_S)
                assert time.monotonic() - began < PATIENCE_S
                for name, result, view in zip(names, results, out, strict=True):
                    assert not result.ok or view == data_of(name)
            seen = len(local)
            assert until(lambda: len(local) > seen + 3)
            assert until(lambda: team.put_from(others[:1], [data_of(others[0])])[0].stored)
        finally:
            stop.set()
            neighbor.join()
        assert all(local)

        mounted.mount.resume()
        again = [bytearray(SIZE) for _ in names]
        assert until(lambda: all(r.ok for r in team.get_into(names, again)), 40)
        assert again == [data_of(name) for name in names]


def test_descriptors_of_a_mount_that_hung_are_all_closed_afterwards(mounted: MountedCluster) -> None:
    put_in_shared_tier_only(mounted)
    names = names_of("team")

    def held() -> int:
        """Files of the mount that this process has open."""
        links = []
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                links.append(os.readlink(f"/proc/self/fd/{fd}"))
        return sum(link.startswith(str(mounted.shared)) for link in links)

    with connect(mounted, "team") as team:
        assert until(lambda: team.get_into(names[:1], [bytearray(SIZE)])[0].ok)
        assert until(lambda: held() == 0)
        mounted.mount.hang("flush")
        assert any(r.ok for r in team.get_into(names, [bytearray(SIZE) for _ in names]))
        assert held() > 0
        mounted.mount.resume()
        assert until(lambda: held() == 0)
