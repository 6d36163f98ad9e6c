"""The whole path with an object store as the shared tier: real sidecars, a real S3-speaking server."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from sc_keys import ONE, ring_text
from sc_nodes import wait_for
from sc_raw import block_id, payload
from sc_s3 import KEY, SECRET, Proxy, S3Server

from kvpool import config
from kvpool.protocol.wire import Tier
from kvpool_sidecar.preflight.finding import Level
from kvpool_sidecar.preflight.shared import check_objects


@pytest.fixture(scope="module")
def s3(tmp_path_factory):
    server = S3Server(tmp_path_factory.mktemp("s3") / "s3.log").start()
    server.make_bucket("kvpool")
    yield server
    server.stop()


@pytest.fixture
def secret(tmp_path):
    directory = tmp_path / "object-secret"
    directory.mkdir()
    (directory / "AWS_ACCESS_KEY_ID").write_text(KEY)
    (directory / "AWS_SECRET_ACCESS_KEY").write_text(SECRET)
    return directory


def far(s3, prefix, **kw):
    return config.FsspecTier("far", f"s3://kvpool/{prefix}", endpoint=s3.url, region="us-east-1", **kw)


def get(connection, one):
    """A first read may take longer than its deadline; it goes on, and the next finds the block on this node."""
    return wait_for(lambda: connection.get([one], ms=10_000)[0], "read from the object store", timeout=30)


@pytest.mark.parametrize("encryption", ["None", "AES256GCM"])
def test_a_block_outlives_its_node_in_the_object_store(cluster, s3, secret, encryption):
    c = cluster()
    (c.secret / "shared-keys.json").write_bytes(ring_text(ONE, ONE))
    tier = {
        "fsspec": far(s3, f"path-{encryption}", encryption=encryption),
        "arguments": (f"--object-secret-dir={secret}",),
    }
    a = c.node("a", **tier)
    data = {block_id(n): payload(n, (n + 1) << 20) for n in range(3)}
    with a.connect("team-a") as connection:
        assert connection.put(data) == [1, 1, 1]
        wait_for(lambda: a.status()["shared"]["copies"].get("copied") == 3, "copied to the object store", timeout=60)
    a.stop()
    shutil.rmtree(a.nvme)
    b = c.node("b", **tier)
    with b.connect("team-b") as other:  # the same block ids in another namespace: nothing of theirs
        assert other.lookup(list(data), ms=5000) == [Tier.MISS] * 3
        assert other.get(list(data), ms=5000) == [None] * 3
    with b.connect("team-a") as connection:
        wait_for(lambda: connection.lookup(list(data), ms=5000) == [Tier.SHARED] * 3, "found in the object store")
        for one, bytes_there in data.items():
            assert get(connection, one) == bytes_there
        assert connection.lookup(list(data)) == [Tier.LOCAL] * 3  # and stays here
        b.wait_announced()
        assert b.status()["index"]["announced"] == 3  # for peers too
    status = b.status()
    assert status["shared"].pop("sweep")["problem"] == ""
    keys = status["shared"].pop("encryption", {"keys": []})["keys"]
    assert len(keys) == status["encryption"].get("decrypted", 0) // 3 == (encryption != "None")
    assert status["shared"] | {"copies": 0} == {
        "configured": True,
        "available": True,
        "problem": "",
        "waiting": 0,
        "dirty_bytes": 0,
        "copies": 0,
    }
    reported = json.dumps(status) + a.log.read_text() + b.log.read_text() + (b.home / "pool.json").read_text()
    assert SECRET not in reported
    for part in ("cmdline", "environ"):
        assert SECRET.encode() not in Path(f"/proc/{b.process.pid}/{part}").read_bytes()


def test_the_reason_why_the_object_store_is_not_used_shows_in_the_status(cluster, s3, secret):
    c = cluster(index=False)
    node = c.node(
        "a",
        fsspec=config.FsspecTier("far", "s3://no-such-bucket/x", endpoint=s3.url, region="us-east-1"),
        arguments=(f"--object-secret-dir={secret}",),
    )
    with node.connect() as connection:
        assert connection.put({block_id(1): payload(1)}) == [1]
        assert connection.get([block_id(1)]) == [payload(1)]
        assert connection.lookup([block_id(2)], ms=3000) == [Tier.MISS]
        wait_for(lambda: "bucket" in node.status()["shared"]["problem"].lower(), "it says why")


def test_credentials_that_may_only_read_show_in_the_status(cluster, s3, secret):
    proxy = Proxy(s3.address)
    c = cluster(index=False)
    tier = config.FsspecTier("far", "s3://kvpool/read-only", endpoint=proxy.url, region="us-east-1")
    node = c.node("a", fsspec=tier, arguments=(f"--object-secret-dir={secret}",))
    with node.connect() as connection:
        assert connection.lookup([block_id(9)], ms=5000) == [Tier.MISS]
        wait_for(lambda: not node.status()["shared"]["problem"], "it answers")
        proxy.refuse = b"PUT "
        assert connection.put({block_id(1): payload(1)}) == [1]
        wait_for(lambda: "AccessDenied" in node.status()["shared"]["problem"], "it says why", timeout=30)
        assert connection.get([block_id(1)]) == [payload(1)]
        proxy.refuse = b""
        assert connection.put({block_id(2): payload(2)}) == [1]
        wait_for(lambda: node.status()["shared"]["copies"].get("copied"), "copied", timeout=30)
        assert node.status()["shared"]["problem"] == ""
    proxy.close()


def test_a_secret_that_is_made_later_is_used_then(cluster, s3, tmp_path):
    directory = tmp_path / "later"
    c = cluster(index=False)
    # no credentials of this machine either
    nothing = {"AWS_EC2_METADATA_DISABLED": "true", "HOME": str(tmp_path), "AWS_SHARED_CREDENTIALS_FILE": "/nothing"}
    node = c.node("a", fsspec=far(s3, "later"), arguments=(f"--object-secret-dir={directory}",), env=nothing)
    with node.connect() as connection:
        assert connection.put({block_id(1): payload(1)}) == [1]
        wait_for(lambda: "no credentials" in node.status()["shared"]["problem"], "it says why", timeout=30)
        directory.mkdir()
        (directory / "AWS_ACCESS_KEY_ID").write_text(KEY)
        (directory / "AWS_SECRET_ACCESS_KEY").write_text(SECRET)

        numbers = itertools.count(2)

        def used() -> bool:
            n = next(numbers)  # what could not be copied is not tried again
            connection.put({block_id(n): payload(n, 1000)})
            time.sleep(0.3)
            return node.status()["shared"]["copies"].get("copied", 0) > 0

        wait_for(used, "used", timeout=60)
        assert connection.lookup([block_id(99)], ms=5000) == [Tier.MISS]
        wait_for(lambda: not node.status()["shared"]["problem"], "nothing is wrong any more")


def test_capacity_stops_copies_and_nothing_else(cluster, s3, secret):
    c = cluster(index=False)
    node = c.node("a", fsspec=far(s3, "small", capacity_bytes=300_000), arguments=(f"--object-secret-dir={secret}",))
    with node.connect() as connection:
        data = {block_id(n): payload(n, 100_000) for n in range(4)}
        assert connection.put(data) == [1] * 4
        copies = lambda: node.status()["shared"]["copies"]  # noqa: E731
        wait_for(lambda: copies().get("full", 0) + copies().get("copied", 0) == 4, "all were tried", timeout=60)
        assert copies() == {"copied": 2, "full": 2}
        assert connection.get(list(data)) == list(data.values())


@pytest.mark.parametrize(("url", "words"), [("gs://x/y", "gcsfs"), ("ftp://x/y", "unknown scheme")])
def test_what_cannot_be_used_is_said_at_the_start(cluster, url, words):
    c = cluster(index=False)
    directory = c.directory / "bad"
    directory.mkdir()
    pool = config.PoolConfig(
        pool="p",
        namespace="n",
        uid="u",
        local=(config.LocalTier("l", str(directory / "nvme"), 1 << 20),),
        index=config.IndexConfig(""),
        fsspec=config.FsspecTier("far", url),
    )
    (directory / "pool.json").write_text(config.dumps(pool))
    ended = subprocess.run(
        [sys.executable, "-m", "kvpool_sidecar", "serve", f"--config={directory}/pool.json", "--node=a",
         f"--secret-dir={c.secret}", f"--socket={directory}/s=t", "--address=127.0.0.1"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ended.returncode == 2
    assert words in ended.stderr


def test_a_look_at_a_node_tries_the_object_store_and_leaves_nothing(s3, secret):
    (found,) = check_objects(far(s3, "looked-at"), "pool-uid", str(secret))
    assert found.level is Level.OK, found
    assert found.values["round_trip_ms"] > 0
    assert b"preflight" not in s3.call("GET", "kvpool?list-type=2")[1]


def test_a_look_at_a_bucket_that_is_not_there_fails_without_a_secret_in_the_message(s3, secret):
    nowhere = config.FsspecTier("far", "s3://nowhere/kv", endpoint=s3.url, region="us-east-1")
    (found,) = check_objects(nowhere, "pool-uid", str(secret))
    assert found.level is Level.FAIL
    assert "NoSuchBucket" in found.message
    assert SECRET not in json.dumps(found.dump())
