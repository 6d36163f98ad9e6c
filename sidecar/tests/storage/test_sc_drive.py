"""A drive of this node: whose directory it is, what a start finds, what goes when space is needed."""

from __future__ import annotations

import os
import time

import pytest
from sc_drive_log import Log

from kvpool.errors import ConfigError, RefusedError, TierFullError
from kvpool_sidecar.storage.base import CommitOutcome
from kvpool_sidecar.storage.layout import block_path
from kvpool_sidecar.tenancy import limits as quota
from kvpool_testing.blocks import key, payload, put, read

MIB = 1 << 20


# -- whose directory


def test_a_directory_of_another_pool_is_refused(make):
    make(uid="u1").close()
    with pytest.raises(ConfigError, match="belongs to pool u1"):
        make(uid="u2")
    make(uid="u1")


def test_a_directory_with_foreign_files_is_refused_and_left_alone(make, tmp_path):
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "precious").write_text("x")
    with pytest.raises(ConfigError, match="precious"):
        make()
    assert os.listdir(tmp_path / "r") == ["precious"]


def test_a_fresh_file_system_is_not_foreign(make, tmp_path):
    (tmp_path / "r" / "lost+found").mkdir(parents=True)
    assert put(make(), 1) == CommitOutcome.STORED


def test_a_directory_that_others_may_write_is_refused(make, tmp_path):
    (tmp_path / "r").mkdir()
    (tmp_path / "r").chmod(0o777)
    with pytest.raises(ConfigError, match="chmod 0700"):
        make()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a directory that is somebody else's")
def test_a_directory_of_another_user_is_refused(make, tmp_path):
    (tmp_path / "r").mkdir()
    os.chown(tmp_path / "r", 65532, 65532)
    with pytest.raises(ConfigError, match="kvpool-sidecar init-node"):
        make()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 2, "pool_uid": "u", "generation": 1}', '{"format": 1}'])
def test_an_unreadable_pool_id_is_refused(make, tmp_path, text):
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "POOL_ID").write_text(text)
    with pytest.raises(ConfigError):
        make()


def test_a_pool_id_that_is_a_link_is_refused(make, tmp_path):
    make(uid="u").close()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "POOL_ID").symlink_to(tmp_path / "r" / "POOL_ID")
    with pytest.raises(OSError, match="symbolic links"):
        make("other")


def test_a_second_sidecar_on_the_same_directory_is_refused(make, monkeypatch):
    monkeypatch.setattr("kvpool_sidecar.storage.local.directory._LOCK_WAIT_S", 0.3)
    first = make()
    with pytest.raises(ConfigError, match="another sidecar"):
        make()
    first.close()
    make()


def test_the_generation_stays_with_the_directory_and_changes_with_a_new_one(make, tmp_path):
    first = make()
    first.close()
    assert make().generation == first.generation
    assert make("other").generation != first.generation


# -- what a start finds


def test_blocks_are_found_again_after_a_restart_in_the_order_of_their_use(make):
    one = make(capacity=10 * MIB)
    for n in range(6):
        put(one, n, MIB)
        # recency is saved to the minute at most: pretend that these were stored long ago
        os.utime(one._state.directory.path + "/blocks/" + block_path(key(n)), (1000 + n, 1000 + n))
    one.close()
    two = make(capacity=10 * MIB)
    assert read(two, 0) == payload(0, MIB)
    two.close()
    three = make(capacity=4 * MIB)  # now too small
    three.maintain()
    left = dict(three.keys())
    assert key(0) in left
    assert key(1) not in left
    assert key(5) in left


def test_junk_is_removed_and_what_is_not_ours_to_remove_stays(make, tmp_path):
    one = make()
    put(one, 1)
    one.close()
    blocks = tmp_path / "r" / "blocks"
    name = key(2).hex()
    (blocks / "zz").mkdir()
    (blocks / "README").write_text("x")
    (blocks / name[:2] / name[2:4]).mkdir(parents=True, exist_ok=True)
    (blocks / name[:2] / name[2:4] / (name + ".tmp")).write_text("x")
    (blocks / name[:2] / name[2:4] / name).write_bytes(b"short")
    (blocks / name[:2] / name[2:4] / key(3).hex()).write_bytes(b"x" * 9000)  # in another's place
    (blocks / name[:2] / "ff").symlink_to(tmp_path)
    (blocks / "kept").mkdir()
    (blocks / "kept" / "file").write_text("x")
    (tmp_path / "r" / "tmp" / "left-behind").write_bytes(b"x" * 9000)
    log = Log()
    two = make(events=log)
    assert list(dict(two.keys())) == [key(1)]
    assert log.counts["junk"] == 7
    assert sorted(str(p.relative_to(blocks)) for p in blocks.rglob("*") if not p.is_dir()) == sorted(
        [block_path(key(1)), "kept/file"]
    )
    assert os.listdir(tmp_path / "r" / "tmp") == []


def test_reads_are_served_while_the_drive_is_scanned_and_writes_wait(make):
    one = make()
    put(one, 1)
    one.close()
    two = make(scan=False)
    assert two.contains(key(1))
    assert not two.contains(key(2))
    assert read(two, 1) == payload(1)
    with pytest.raises(TierFullError, match="scanned"):
        two.begin(key(2), 1000)
    two.scan()
    assert two.usage().blocks == 1
    assert put(two, 2) == CommitOutcome.STORED


@pytest.mark.parametrize("kind", ["link", "fifo", "directory", "empty"])
def test_whatever_is_planted_in_a_blocks_place_is_a_miss(make, tmp_path, kind):
    one = make()
    put(one, 1)
    secret = tmp_path / "secret"
    secret.write_bytes(b"s" * 9000)
    place = tmp_path / "r" / "blocks" / block_path(key(1))
    place.unlink()
    if kind == "link":
        place.symlink_to(secret)
    elif kind == "fifo":
        os.mkfifo(place)
    elif kind == "directory":
        place.mkdir()
    else:
        place.touch()
    assert one.open(key(1)) is None
    assert not one.contains(key(1))
    assert secret.exists()


@pytest.mark.parametrize("change", [-5000, -1, 1, 4096])
def test_a_block_of_another_length_than_it_was_stored_with_is_quarantined_when_it_is_opened(make, tmp_path, change):
    one = make()
    put(one, 1)
    place = tmp_path / "r" / "blocks" / block_path(key(1))
    place.chmod(0o600)
    os.truncate(place, place.stat().st_size + change)
    assert one.open(key(1)) is None
    assert not one.contains(key(1))
    assert not place.exists()
    assert one.usage().blocks == 0
    put(one, 1)
    assert read(one, 1) is not None


def test_a_fan_out_directory_replaced_by_a_link_is_a_miss(make, tmp_path):
    one = make()
    put(one, 1)
    outer = tmp_path / "r" / "blocks" / key(1).hex()[:2]
    outer.rename(tmp_path / "moved")
    outer.symlink_to(tmp_path / "moved")
    assert one.open(key(1)) is None


# -- space


def test_a_full_store_evicts_the_least_recently_used_and_says_so(make):
    log = Log()
    one = make(policy="LRU", capacity=10 * MIB, events=log)
    for n in range(8):
        put(one, n, MIB)
    assert read(one, 0) is not None
    for n in range(8, 12):
        assert put(one, n, MIB) == CommitOutcome.STORED
    assert one.usage().used_bytes <= 10 * MIB
    assert one.contains(key(0))
    assert not one.contains(key(1))
    assert key(1) in log.keys
    assert log.counts["evicted"] == len(log.keys)


def test_above_the_high_watermark_housekeeping_goes_down_to_the_low_one(make):
    one = make(capacity=10 * MIB)
    for n in range(9):
        put(one, n, MIB - 8192)
    assert one.usage().used_bytes > 8.5 * MIB
    one.maintain()
    assert 6.4 * MIB < one.usage().used_bytes <= 7.5 * MIB
    before = one.usage()
    one.maintain()
    assert one.usage() == before


def test_more_blocks_than_the_table_may_hold_go_too(make):
    one = make(limits=quota.CapacityLimits(64 * MIB, 85, 75, 10), policy="LRU")
    for n in range(15):
        put(one, n)
    one.maintain()
    assert one.usage().blocks == 10
    assert not one.contains(key(4))


def test_the_reserve_of_the_file_system_is_left_free(make, tmp_path):
    info = os.statvfs(tmp_path)
    free = info.f_bavail * info.f_frsize
    log = Log()
    one = make(limits=quota.CapacityLimits(64 * MIB, 85, 75, 100, reserve_bytes=0), events=log)
    put(one, 1)
    one._state.limits = one._state.limits._replace(reserve_bytes=free + (1 << 40))  # as if others had filled the drive
    with pytest.raises(TierFullError, match="no space to spare"):
        one.begin(key(2), 20_000)
    assert not one.contains(key(1))
    one._state.limits = one._state.limits._replace(reserve_bytes=0)
    assert put(one, 2) == CommitOutcome.STORED


def test_promised_space_counts_and_is_given_back(make):
    one = make(capacity=4 * MIB)
    pending = [one.begin(key(n), MIB - 8192) for n in range(2)]
    with pytest.raises(TierFullError):
        one.begin(key(9), MIB)
    for p in pending:
        p.abort()
    assert put(one, 9, MIB) == CommitOutcome.STORED


def test_a_block_that_can_never_fit_evicts_nothing(make):
    one = make(capacity=4 * MIB)
    put(one, 1, MIB)
    with pytest.raises(TierFullError):
        one.begin(key(2), 5 * MIB)
    assert one.contains(key(1))


def test_a_forgotten_writer_is_given_up_and_its_space_is_free_at_once(make):
    log = Log()
    one = make(events=log, pending_max_age_s=0.05)
    pending = one.begin(key(1), MIB)
    kept = os.dup(pending.writer)
    os.pwrite(kept, b"x" * MIB, 0)
    time.sleep(0.06)
    one.maintain()
    assert log.counts["writers_given_up"] == 1
    assert os.fstat(kept).st_blocks == 0
    with pytest.raises(RefusedError):
        pending.commit()
    os.close(kept)


def test_the_quarantine_is_small_and_counts(make, tmp_path):
    one = make()
    for n in range(12):
        put(one, n)
        one.quarantine(key(n))
    assert len(os.listdir(tmp_path / "r" / "quarantine")) == 8
    assert one.usage().blocks == 0
    assert one.usage().used_bytes > 8 * 20_000
