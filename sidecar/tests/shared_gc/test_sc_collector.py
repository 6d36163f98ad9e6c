"""Collectors of a shared directory: lease, rate and take-over. Real directories, no processes."""

from __future__ import annotations

import os
import threading
import time

import pytest
from sc_nodes import wait_for
from sc_shared_gc import DAY, FAST, FILE, HOUR, Shared

from kvpool_sidecar.shared_gc import collection as sweep
from kvpool_sidecar.shared_gc import metadata as folder
from kvpool_sidecar.shared_gc.collection import CollectionStoppedError, LeaseLostError, entry_rate_limiter
from kvpool_sidecar.shared_gc.filesystem_collector import Schedule
from kvpool_sidecar.shared_gc.metadata import TierMetadata
from kvpool_sidecar.shared_gc.usage import StoredUsage, UsageReport
from kvpool_sidecar.system import safe_open as safefs
from kvpool_testing.blocks import TAG, put


@pytest.fixture
def shared(tmp_path):
    one = Shared(tmp_path / "shared")
    yield one
    for store in one.stores:
        store.close()


def aged(path, age):
    os.utime(path, (time.time() - age,) * 2, follow_symlinks=False)


# -- who may, and how fast


def test_a_sweeper_that_lost_the_lease_removes_nothing_more(shared):
    for n in range(200):
        shared.put(n, idle=DAY)
    one = shared.sweeper(idle_s=HOUR)
    two = shared.sweeper(own_store=True)

    def overtaken(_key):
        shared.swept.append(_key)
        if len(shared.swept) == 10:  # `one` is stopped here for longer than the lease
            for file in (shared.path / "sweep").glob("term-*"):
                aged(file, 31)
            two.step()
            assert two.status()["holder"]
            one._lease._asked_at -= 31

    one._removed = overtaken
    one.step()
    assert len(shared.swept) == 10
    assert len(shared.left(range(200))) == 190
    assert not one.status()["holder"]
    one.step()
    assert len(shared.swept) == 10


def test_a_sweep_that_is_cut_short_by_the_end_of_the_process_gives_the_lease_back(shared):
    for n in range(50):
        shared.put(n, idle=DAY)
    one = shared.sweeper(idle_s=HOUR, timing=FAST._replace(entries_per_s=10.0))
    one.start()
    wait_for(lambda: shared.swept, "it has begun")
    one.stop(30.0)
    assert len(shared.left(range(50))) > 0
    two = shared.sweeper(own_store=True, idle_s=HOUR)
    two.step()
    assert two.status()["holder"]
    assert shared.left(range(50)) == []


def test_the_pace_holds_on_the_average():
    clock, slept = [0.0], []

    def wait(seconds):
        slept.append(seconds)
        clock[0] += seconds
        return False

    pace = entry_rate_limiter(100.0, wait)
    pace._clock = lambda: clock[0]
    for _ in range(1000):
        pace.acquire(3)
        clock[0] += 0.001
    assert 29 < clock[0] < 31.5
    assert len(slept) == 1000
    with pytest.raises(CollectionStoppedError):
        entry_rate_limiter(100.0, lambda _s: True).acquire(100)


def test_a_long_sweep_keeps_the_lease_and_tells_meanwhile(shared):
    for n in range(40):
        shared.put(n)
    one = shared.sweeper(timing=Schedule(lease_s=0.4, every_s=1e9, entries_per_s=30.0))
    two = shared.sweeper(own_store=True, timing=Schedule(lease_s=0.4, every_s=1e9, entries_per_s=1e9))
    thread = threading.Thread(target=one.step)
    thread.start()
    wait_for(lambda: one.status()["sweeping"], "it sweeps")
    while thread.is_alive():
        two.step()
        thread.join(0.1)
    assert one.status()["holder"]
    assert one.status()["term"] == 1
    assert not two.status()["holder"]
    assert two.status()["blocks"] in (0, 40)


def test_memory_does_not_grow_with_the_number_of_blocks(shared, monkeypatch):
    """No list of names: of each directory one entry is held at a time."""
    from kvpool_sidecar.shared_gc import walk

    monkeypatch.setattr(os, "listdir", lambda *_: pytest.fail("all names at once"))
    for n in range(50):
        shared.put(n)
    held = []
    true = walk.LeafDirectory.blocks

    def watched(leaf):
        for found in true(leaf):
            held.append(found.name)
            yield found
            assert held.pop() == found.name

    monkeypatch.setattr(walk.LeafDirectory, "blocks", watched)
    sweeper = shared.sweeper(capacity=10 * FILE)
    sweeper.step()
    assert shared.stats.whole("swept")["capacity"] >= 40


def test_of_very_many_blocks_a_part_of_the_headers_tells_of_all(shared, monkeypatch):
    monkeypatch.setattr(sweep, "_READ_ALL", 64)
    for n in range(300):
        put(shared.store, n, 100)
    sweeper = shared.sweeper()
    sweeper._report = UsageReport(finished=0.0, used=StoredUsage(1, 300))
    with TierMetadata(str(shared.path), shared.uid) as tier:
        folder.write_note(tier.sweep, folder.SUMMARY, sweeper._report.to_json())
    opened, true = [], safefs.open_beneath
    monkeypatch.setattr(
        safefs, "open_beneath", lambda fd, path, *a, **k: opened.append(path) or true(fd, path, *a, **k)
    )
    sweeper.step()
    headers = sum(len(path) == 64 for path in opened)
    assert 10 < headers < 80
    reported = sweeper.status()["tenants"][TAG.hex()]
    assert 0.3 < reported / (300 * 4196) < 2.0
    assert sweeper.status()["used_bytes"] == 300 * 4196


def test_a_mount_that_fails_is_told_and_tried_again(shared):
    sweeper = shared.sweeper()
    sweeper._attempt(sweeper.step)  # no one has stored anything yet
    assert sweeper.status()["problem"] == ""
    assert not sweeper.status()["holder"]
    shared.put(1)
    moved = shared.path.with_name("away")
    os.rename(shared.path, moved)
    sweeper._attempt(sweeper.step)
    assert "No such file" in sweeper.status()["problem"]
    os.rename(moved, shared.path)
    sweeper._attempt(sweeper.step)
    assert sweeper.status()["problem"] == ""
    assert sweeper.status()["holder"]


def test_the_error_for_a_lost_lease_is_no_error_of_the_mount():
    assert not issubclass(LeaseLostError, OSError)
