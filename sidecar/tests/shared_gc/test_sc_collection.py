"""Collections of a shared directory: what is removed and what stays. Real directories, no processes."""

from __future__ import annotations

import errno
import os
import random
import threading
import time

import pytest
from sc_nodes import wait_for
from sc_shared_gc import DAY, FILE, HOUR, SIZE, Shared, again

from kvpool.errors import ConfigError
from kvpool_sidecar.blocks.events import SharedBlockOpened
from kvpool_sidecar.counters import Stats
from kvpool_sidecar.shared_gc import collection as sweep
from kvpool_sidecar.shared_gc import metadata as folder
from kvpool_sidecar.shared_gc.access_times import AccessTimes
from kvpool_sidecar.shared_gc.filesystem_collector import FilesystemCollector
from kvpool_sidecar.shared_gc.metadata import TierMetadata
from kvpool_sidecar.shared_gc.plan import CollectionLimits
from kvpool_testing.blocks import TAG, key, payload, read


@pytest.fixture
def shared(tmp_path):
    one = Shared(tmp_path / "shared")
    yield one
    for store in one.stores:
        store.close()


# -- what goes


def test_capacity_holds_and_the_least_recently_used_go(shared):
    for n in range(20):
        shared.put(n, idle=n * HOUR)
    sweeper = shared.sweeper(capacity=20 * FILE, high_percent=80, low_percent=50)
    sweeper.step()
    assert shared.left(range(20)) == list(range(10))
    assert sorted(shared.swept) == sorted(key(n) for n in range(10, 20))
    assert shared.stats.whole("swept") == {"capacity": 10}
    assert shared.stats.whole("swept_bytes") == {"capacity": 10 * FILE}
    status = sweeper.status()
    assert (status["used_bytes"], status["blocks"], status["holder"]) == (10 * FILE, 10, True)
    assert status["tenants"] == {TAG.hex(): 10 * FILE}
    assert [read(shared.store, n) for n in range(10)] == [payload(n) for n in range(10)]


def test_a_sweep_that_takes_long_takes_no_more_for_it(shared, monkeypatch):
    """Between the walks all blocks grow older."""
    for n in range(20):
        shared.put(n, idle=n * 2.0)
    true, later = sweep.make_plan, []

    def slow_plan(*args, **kw):
        later.append(1000.0)
        return true(*args, **kw)

    monkeypatch.setattr(sweep, "make_plan", slow_plan)
    sweeper = shared.sweeper(capacity=20 * FILE, high_percent=80, low_percent=50)
    monkeypatch.setattr(sweeper, "_now", lambda: time.time() + sum(later))
    sweeper.step()
    assert shared.left(range(20)) == list(range(10))


def test_what_was_stored_since_the_count_makes_the_holder_sweep_again(shared):
    shared.claim()
    sweeper = shared.sweeper(capacity=20 * FILE, high_percent=80, low_percent=50)
    sweeper.step()
    for n in range(16):
        shared.put(n, idle=n * HOUR)
    sweeper.step()
    assert len(shared.left(range(99))) == 16
    shared.put(16, idle=16 * HOUR)
    sweeper._not_before = 0.0
    sweeper.step()
    assert shared.left(range(99)) == list(range(10))


def test_what_another_sidecar_stored_counts_too(shared):
    shared.claim()
    one = shared.sweeper(own_store=True, capacity=20 * FILE, high_percent=80, low_percent=50)
    two = shared.sweeper(capacity=20 * FILE, high_percent=80, low_percent=50)
    one.step()
    for n in range(17):
        shared.put(n, idle=n * HOUR)
    two.step()
    assert not two.status()["holder"]
    one._not_before = 0.0
    one.step()
    assert len(shared.left(range(99))) == 10
    two.step()
    assert two.status()["used_bytes"] == 10 * FILE
    assert shared.store.usage().used_bytes == 10 * FILE


def test_only_the_holder_reads_what_the_others_tell(shared, monkeypatch):
    shared.claim()
    sweepers = [shared.sweeper(own_store=True) for _ in range(5)]
    read, true = [], folder.read_note
    monkeypatch.setattr(folder, "read_note", lambda fd, name: read.append(name) or true(fd, name))
    for _ in range(2):
        for sweeper in sweepers:
            read.clear()
            sweeper.step()
            if not sweeper.status()["holder"]:
                assert read == ["summary"]
    sweepers[0].step()
    assert len([name for name in read if name.startswith("node-")]) >= 5


def test_quota_of_a_tenant(shared):
    other = b"u" * 16
    for n in range(10):
        shared.put(n, idle=n * HOUR)
    for n in range(10, 14):
        shared.put(n, idle=100 * HOUR, tenant=other)
    sweeper = shared.sweeper(capacity=100 * FILE, high_percent=80, low_percent=64, tenant_bytes=5 * FILE)
    sweeper.step()
    assert shared.left(range(14)) == [0, 1, 2, 3, 10, 11, 12, 13]
    assert shared.stats.whole("swept") == {"quota": 6}
    assert sweeper.status()["tenants"] == {TAG.hex(): 4 * FILE, other.hex(): 4 * FILE}


def test_idle_and_age(shared):
    shared.put(1, idle=0.5 * HOUR)
    shared.put(2, idle=1.5 * HOUR)
    shared.put(3, idle=0.1 * HOUR, made=9 * HOUR)
    shared.put(4, idle=0.1 * HOUR, made=11 * HOUR)
    shared.put(5, idle=0.1 * HOUR, made=-400 * HOUR)  # by a clock that is ahead
    shared.sweeper(idle_s=HOUR, max_age_s=10 * HOUR, grace_s=60.0).step()
    assert shared.left(range(9)) == [1, 3, 5]
    assert shared.stats.whole("swept") == {"idle": 1, "age": 1}


def test_a_maker_whose_clock_is_ahead_makes_no_block_immortal(shared):
    shared.put(1, idle=11 * HOUR, made=-400 * HOUR)
    shared.put(2, idle=9 * HOUR, made=-400 * HOUR)
    shared.sweeper(max_age_s=10 * HOUR).step()
    assert shared.left([1, 2]) == [2]


@pytest.mark.parametrize("jump", [8 * DAY, -8 * DAY])
def test_fault_26_a_node_whose_clock_jumps_finds_no_block_too_old(shared, monkeypatch, jump):
    """Ages are those that the mount reports."""
    shared.put(1, idle=0.5 * HOUR)
    shared.put(2, idle=2 * HOUR)
    wall = time.time()
    monkeypatch.setattr(time, "time", lambda: wall + jump)
    sweeper = shared.sweeper(idle_s=HOUR, max_age_s=3 * HOUR)
    sweeper.step()
    assert shared.left([1, 2]) == [1]
    assert not shared.store.touch(key(1), HOUR)
    assert shared.store.touch(key(1), 60.0)


def test_a_use_is_noted_so_what_is_in_use_stays(shared):
    shared.put(1, idle=2 * HOUR)
    shared.put(2, idle=2 * HOUR)
    touches = AccessTimes(shared.store.touch, shared.stats, every_s=600.0)
    shared.store.events.subscribe(SharedBlockOpened, lambda event: touches.record(event.block_key))
    touches.start()
    assert read(shared.store, 1) == payload(1)
    wait_for(lambda: shared.stats.whole("touches") == {"touched": 1}, "the use is noted")
    touches.stop()
    assert not shared.store.touch(key(1), 600.0)  # not again so soon
    shared.sweeper(idle_s=HOUR).step()
    assert shared.left([1, 2]) == [1]


def test_a_lookup_that_found_a_block_on_a_node_is_a_use_of_its_copy(shared):
    for n in range(4):
        shared.put(n, idle=2 * HOUR)
    touches = AccessTimes(shared.store.touch, shared.stats, every_s=600.0)
    touches.on_lookup(TAG, [key(n) for n in range(4)] + [key(9)], bytes([1, 2, 3, 0, 1]), 0.0)
    touches.start()
    wait_for(lambda: touches.queued == 0, "all are dealt with")
    wait_for(lambda: shared.stats.whole("touches") == {"touched": 2}, "of those that are there")
    touches.stop()
    shared.sweeper(idle_s=HOUR).step()
    assert shared.left(range(4)) == [0, 1]


def test_a_superseded_fingerprint_goes_first(shared):
    old, new = b"o" * 32, b"n" * 32
    for n in range(8):
        shared.put(n, idle=8 * DAY, made=30 * DAY, fingerprint=old)
    for n in range(8, 20):
        shared.put(n, idle=20 * DAY if n < 19 else 0.0, made=20 * DAY, fingerprint=new)
    sweeper = shared.sweeper(
        capacity=20 * FILE, high_percent=80, low_percent=60, models=lambda: [(old, "model"), (new, "model")]
    )
    with TierMetadata(str(shared.path), shared.uid) as tier:
        sweeper._publish_usage(tier)
        sweeper._note_models(tier)
    os.utime(shared.path / "sweep" / f"model-{old.hex()}", (time.time() - 8 * DAY,) * 2)
    sweeper.step()
    assert shared.stats.whole("swept") == {"superseded": 8}
    assert shared.left(range(20)) == list(range(8, 20))


def aged(path, age):
    os.utime(path, (time.time() - age,) * 2, follow_symlinks=False)


def test_files_that_writers_left_go_after_an_hour_and_not_before(shared):
    shared.claim()
    sweeper = shared.sweeper()
    sweeper.step()
    places = {
        "tmp": "ab" * 16,
        "sweep": f"node-{'0' * 16}",
        "": ".POOL_ID." + "ab" * 8,
    }
    for directory, name in places.items():
        for file, age in ((name, 4000), (name.replace("a", "c").replace("0", "1"), 3000)):
            (shared.path / directory / file).touch()
            aged(shared.path / directory / file, age)
    (shared.path / "sweep" / ("summary." + "ab" * 8)).touch()
    aged(shared.path / "sweep" / ("summary." + "ab" * 8), 4000)
    again(sweeper)
    assert shared.stats.whole("swept") == {"temporary": 4}
    assert os.listdir(shared.path / "tmp") == ["cb" * 16]
    assert not (shared.path / "sweep" / f"node-{'0' * 16}").exists()
    assert (shared.path / "sweep" / f"node-{'1' * 16}").exists()


def test_of_quarantined_blocks_a_few_stay(shared):
    for n in range(12):
        shared.put(n)
        shared.store.quarantine(key(n))
    sweeper = shared.sweeper()
    sweeper.step()
    assert len(os.listdir(shared.path / "quarantine")) == 12  # none is old
    sweep._SAFE_AGE_S, before = -1.0, sweep._SAFE_AGE_S
    try:
        again(sweeper)
    finally:
        sweep._SAFE_AGE_S = before
    assert len(os.listdir(shared.path / "quarantine")) == 8
    assert shared.stats.whole("swept")["quarantine"] == 4


def test_nothing_is_touched_that_is_not_called_as_we_call_things(shared, tmp_path):
    for n in range(3):
        shared.put(n, idle=100 * DAY)
    victim = shared.file(0)
    outside = tmp_path / "outside"
    (outside / "cd").mkdir(parents=True)
    blocks = shared.path / "blocks"
    name = "ab" + "cd" + "0" * 60
    strange = [
        shared.path / "notes.txt",
        shared.path / "tmp" / "report.txt",
        shared.path / "sweep" / "mine",
        shared.path / "quarantine" / "mine",
        blocks / "readme",
        blocks / "zz" / "readme",
        victim.parent / "readme",
        victim.parent / (victim.name + ".part"),
        victim.parent / ("0" * 64),  # of another directory
        outside / "cd" / name,
        outside / victim.name,
    ]
    for file in strange:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"precious" * 1000)
        aged(file, 100 * DAY)
    links = [blocks / "ab", victim.parent / (victim.name[:4] + "f" * 60), shared.path / "tmp" / ("ab" * 16)]
    links[0].exists() and links[0].rmdir()
    links[0].symlink_to(outside)
    links[1].symlink_to(outside / victim.name)
    links[2].symlink_to(outside / victim.name)
    (victim.parent / (victim.name[:4] + "e" * 60)).mkdir()
    for link in links:
        aged(link, 100 * DAY)
    shared.sweeper(capacity=1, idle_s=1.0, max_age_s=1.0).step()
    assert shared.left(range(3)) == []
    assert [file for file in strange if file.read_bytes() != b"precious" * 1000] == []
    assert all(link.is_symlink() for link in links)
    assert (victim.parent / (victim.name[:4] + "e" * 60)).is_dir()


def test_another_pools_directory_is_never_swept(tmp_path):
    one, two = Shared(tmp_path / "one", "uid-1"), Shared(tmp_path / "two", "uid-2")
    for n in range(4):
        one.put(n, idle=DAY)
        two.put(n, idle=DAY)
    one.sweeper(idle_s=1.0).step()
    assert one.left(range(4)) == []
    assert two.left(range(4)) == list(range(4))
    mistaken = FilesystemCollector(str(two.path), "uid-1", CollectionLimits(idle_s=1.0), two.store, Stats())
    with pytest.raises(ConfigError, match="not the directory of this pool"):
        mistaken.step()
    (two.path / "POOL_ID").unlink()
    with pytest.raises(ConfigError):
        two.sweeper(idle_s=1.0).step()
    assert two.left(range(4)) == list(range(4))
    os.rename(one.path, tmp_path / "moved")
    os.symlink(two.path, one.path)
    with pytest.raises(OSError, match=r"symbolic links|Not a directory") as reported:
        one.sweeper(idle_s=1.0).step()
    assert reported.value.errno in (errno.ELOOP, errno.ENOTDIR)
    for pool in (one, two):
        pool.store.close()


def test_a_directory_that_was_mounted_over_is_another_file_system_and_stays(shared, monkeypatch):
    shared.put(1, idle=DAY)
    with TierMetadata(str(shared.path), shared.uid) as tier:
        from kvpool_sidecar.shared_gc.walk import leaves

        assert len(list(leaves(tier.blocks, tier.device))) == 1
        assert list(leaves(tier.blocks, tier.device + 1)) == []


def test_empty_directories_go_once_they_are_old(shared):
    for n in range(3):
        shared.put(n, idle=DAY)
    sweeper = shared.sweeper(idle_s=HOUR)
    sweeper.step()
    blocks = shared.path / "blocks"
    assert len(list(blocks.iterdir())) == 3
    aged(shared.file(0).parent, DAY)
    again(sweeper)
    assert len(list(blocks.iterdir())) == 2
    assert not shared.file(0).parent.parent.exists()
    shared.put(0)
    assert read(shared.store, 0) == payload(0)


def test_a_block_that_is_read_while_it_is_swept_is_whole_or_a_miss(shared):
    rng = random.Random(3)
    numbers = range(60)
    stop, wrong, seen = threading.Event(), [], {"hit": 0, "miss": 0}

    def read_on():
        while not stop.is_set():
            n = rng.choice(numbers)
            data = read(shared.store, n)  # raises if it is not whole
            seen["miss" if data is None else "hit"] += 1
            if data is not None and data != payload(n, SIZE):
                wrong.append(n)

    reader = threading.Thread(target=read_on)
    reader.start()
    try:
        deadline = time.monotonic() + 60
        while (min(seen.values()) < 50) and time.monotonic() < deadline:
            for n in numbers:
                if not shared.store.contains(key(n)):
                    shared.put(n, idle=DAY)
            sweeper = shared.sweeper(idle_s=HOUR)
            sweeper.step()
            sweeper.resign()
    finally:
        stop.set()
        reader.join()
    assert not wrong
    assert min(seen.values()) >= 50
