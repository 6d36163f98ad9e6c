"""A tier in a volume that lives with the sidecar's pod: only the server touches it, in a directory of its own."""

from __future__ import annotations

import os

import pytest
from sc_nodes import MIB, Cluster
from sc_raw import block_id, payload

from kvpool import config
from kvpool.protocol import wire
from kvpool_sidecar.commands.init_node import ServerUser, init_node
from kvpool_sidecar.commands.wipe import wipe
from kvpool_sidecar.preflight.run import PreflightSettings, run
from kvpool_sidecar.storage.local.directory import TierDirectory

UID = "pool-uid"


def pool(*tiers):
    return config.PoolConfig("test", "kvpool", UID, tiers, config.IndexConfig(""))


def in_volume(volume):
    return config.LocalTier("second", str(volume / "kvpool"), MIB, reserve_free_percent=0, is_ephemeral=True)


def test_init_node_prepares_directories_of_the_node_alone(tmp_path):
    on_node = config.LocalTier("nvme", str(tmp_path / "nvme"), MIB)
    init_node(pool(on_node, in_volume(tmp_path / "not-mounted")), ServerUser(os.geteuid(), os.getegid()))
    assert os.listdir(tmp_path) == ["nvme"]


def test_a_wipe_finds_nothing_where_the_volume_is_not_mounted(tmp_path):
    assert wipe(pool(in_volume(tmp_path / "not-mounted"))) == 0
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("mode", [0o777, 0o2775], ids=["for everybody", "for the group"])
def test_the_server_makes_a_directory_that_is_its_own_whatever_the_volumes_mode(tmp_path, mode):
    volume = tmp_path / "volume"
    volume.mkdir()
    (volume / "lost+found").mkdir(0o700)
    volume.chmod(mode)
    tier = in_volume(volume)
    TierDirectory(tier.name, tier.path, UID, read_path=None, use_tmpfile=True).close()
    assert os.stat(tier.path).st_mode & 0o777 == 0o700
    # of a container that restarts
    TierDirectory(tier.name, tier.path, UID, read_path=None, use_tmpfile=True).close()


def test_a_preflight_run_leaves_the_volume_out_and_the_check_of_a_sidecar_does_not(tmp_path):
    settings = PreflightSettings(pool(in_volume(tmp_path)), "node-a")
    (later,) = [f for f in run(settings, measure=False).findings if f.tier]
    assert (later.check, later.level.value, later.tier) == ("Volume", "Ok", "second")
    (tmp_path / "kvpool").mkdir(mode=0o700)
    found = {f.check for f in run(settings, measure=False).findings if f.tier}
    assert "Volume" not in found
    assert "Space" in found


def test_blocks_are_stored_and_loaded_and_survive_a_container_that_restarts(tmp_path):
    """With a directory as the volume: what a driver adds is the mount."""
    volume = tmp_path / "volume"
    volume.mkdir(mode=0o777)
    tier = config.LocalTier("nvme", str(volume / "kvpool"), 64 * MIB, reserve_free_percent=0, is_ephemeral=True)
    data = {block_id(n): payload(n) for n in range(4)}
    with Cluster(tmp_path, index=False) as cluster:
        node = cluster.node("a", local=(tier,))
        with node.connect() as raw:
            assert set(raw.put(data)) == {wire.CommitStatus.STORED}
        node.stop()
        node.start()
        node.ready()
        with node.connect() as raw:
            assert raw.get(list(data)) == list(data.values())
    assert {one.name for one in volume.iterdir()} == {"kvpool"}
