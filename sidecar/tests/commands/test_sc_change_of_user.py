"""The directories of a pool get a new owner, by the capability CHOWN alone, and only if they are this pool's."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from kvpool import config
from kvpool_sidecar.commands import init_node as module
from kvpool_sidecar.commands.init_node import ServerUser, init_node
from kvpool_sidecar.preflight.drive import check_drive
from kvpool_sidecar.preflight.finding import Level
from kvpool_sidecar.storage import layout as names

OLD, NEW, GROUP = 65532, 2_012_345_678, 65532
KEYS = [bytes([n]) * 32 for n in range(20)]

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")

DROPPED = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
for capability in range(1, 64):
    libc.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP
header = (ctypes.c_uint32 * 2)(0x20080522, 0)
data = (ctypes.c_uint32 * 6)(1, 1, 0, 0, 0, 0)  # CAP_CHOWN
assert libc.capset(header, data) == 0
os.execv(sys.executable, [sys.executable, "-m", "kvpool_sidecar", *sys.argv[1:]])
"""


@pytest.fixture
def tier(tmp_path):
    """A drive's directory as a sidecar of user OLD left it."""
    for folder in (tmp_path, *tmp_path.parents):
        if folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o055)
    path = tmp_path / "nvme"
    path.mkdir()
    fd = os.open(path, os.O_RDONLY)
    names.claim_directory(fd, "pool-uid", str(path))
    os.close(fd)
    for key in KEYS:
        block = path / names.BLOCKS / names.block_path(key)
        block.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        block.write_bytes(key)
        block.chmod(0o400)
    (path / names.BLOCKS / "link").symlink_to("/etc/passwd")
    for entry in [path, *path.rglob("*")]:
        os.chown(entry, OLD, GROUP, follow_symlinks=False)
    path.chmod(0o700)
    return path


def pool_of(path, uid="pool-uid"):
    tiers = (config.LocalTier("nvme", str(path), 1 << 30),)
    return config.PoolConfig(pool="p", namespace="n", uid=uid, local=tiers, index=config.IndexConfig(""))


def owners(path) -> set[int]:
    return {os.lstat(entry).st_uid for entry in [path, *path.rglob("*")]}


def prepare(tmp_path, path, *arguments):
    """As in the pod: user 0 with CHOWN alone."""
    file = tmp_path / "pool.json"
    file.write_text(config.dumps(pool_of(path)))
    file.chmod(0o644)
    command = [sys.executable, "-c", DROPPED, "init-node", f"--config={file}", f"--uid={NEW}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_every_file_gets_the_new_owner_and_keeps_its_mode_and_bytes(tmp_path, tier):
    before = Path("/etc/passwd").stat().st_uid
    for _ in range(2):
        done = prepare(tmp_path, tier, "--migrate")
        assert done.returncode == 0, done.stderr
        assert owners(tier) == {NEW}
    for key in KEYS:
        block = tier / names.BLOCKS / names.block_path(key)
        assert block.read_bytes() == key
        assert stat.S_IMODE(block.stat().st_mode) == 0o400
    assert Path("/etc/passwd").stat().st_uid == before


@pytest.mark.parametrize("steps", range(1, 12))
def test_an_interrupted_change_is_continued(tier, monkeypatch, steps):
    calls = 0
    chown = os.chown

    def interrupted(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls > steps:
            raise KeyboardInterrupt
        chown(*args, **kwargs)

    monkeypatch.setattr(module.os, "chown", interrupted)
    with pytest.raises(KeyboardInterrupt):
        init_node(pool_of(tier), ServerUser(NEW, GROUP, migrate=True))
    monkeypatch.undo()
    init_node(pool_of(tier), ServerUser(NEW, GROUP, migrate=True))
    assert owners(tier) == {NEW}


def test_without_migrate_the_directory_stays_with_the_sidecar_that_may_serve_from_it(tmp_path, tier):
    done = prepare(tmp_path, tier)
    assert done.returncode == 0, done.stderr
    assert owners(tier) == {OLD}


def test_another_pools_directory_keeps_its_owner(tier):
    with pytest.raises(module.ConfigError):
        init_node(pool_of(tier, "another"), ServerUser(NEW, GROUP, migrate=True))
    assert owners(tier) == {OLD}
    assert tier.stat().st_gid == GROUP


def test_a_directory_of_a_user_of_the_node_is_refused(tier):
    os.chown(tier, 1000, 1000)
    with pytest.raises(module.ConfigError):
        init_node(pool_of(tier), ServerUser(NEW, GROUP, migrate=True))
    assert tier.stat().st_uid == 1000


def test_a_preflight_check_leaves_a_directory_in_use_to_its_sidecar(tier):
    (finding,) = check_drive(pool_of(tier).local[0], "pool-uid", expected_mb_s=1000)
    assert finding.level is Level.WARN
    assert str(OLD) in finding.message
