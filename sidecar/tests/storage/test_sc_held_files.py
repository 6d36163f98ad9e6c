"""Descriptors that pods keep of removed blocks: who is charged, what is freed, and who loses blocks for it."""

from __future__ import annotations

import fcntl
import os

import pytest
from sc_landing import MIB, make_zone

from kvpool.errors import TierFullError
from kvpool_sidecar.storage.landing.ledger import Writer
from kvpool_sidecar.storage.landing.zone import Wanted
from kvpool_sidecar.storage.local import held as module
from kvpool_sidecar.storage.local.space import SpaceManager
from kvpool_sidecar.tenancy import limits as quota
from kvpool_testing.blocks import header, key, payload, put, write
from kvpool_testing.drives import make_drive

EVIL, GOOD = b"e" * 16, b"g" * 16


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def drive(tmp_path):
    one = make_drive("nvme", str(tmp_path / "r"), quota.CapacityLimits(64 * MIB, 85, 75, 1000))
    one.scan()
    one.held._clock = Clock()
    yield one
    one.close()


def open_by(drive, tenant, n) -> int:
    fd = drive.open(key(n)).fd
    drive.held.record_opened([key(n)], tenant)
    return fd


def test_a_removed_file_is_charged_to_who_has_it_open(drive):
    put(drive, 1, MIB)
    put(drive, 2, MIB)
    fd = open_by(drive, EVIL, 1)
    drive.delete(key(1))
    drive.delete(key(2))
    assert drive.held.by_tenant() == {EVIL: MIB + 4096}
    os.close(fd)
    drive.maintain()
    assert drive.held.by_tenant() == {}


def test_what_an_earlier_process_handed_out_has_no_known_holder(drive):
    put(drive, 1, MIB)
    fd = drive.open(key(1)).fd
    drive.delete(key(1))
    assert drive.held.by_tenant() == {b"": MIB + 4096}
    os.close(fd)


def test_the_space_of_a_held_file_is_free_after_the_grace_period_and_its_holder_reads_the_end(drive):
    put(drive, 1, MIB)
    fd = open_by(drive, EVIL, 1)
    drive.delete(key(1))
    drive.maintain()
    assert os.fstat(fd).st_blocks * 512 >= MIB  # a load in progress ends well
    drive.held._clock.now += module.GRACE_S
    drive.maintain()
    assert os.fstat(fd).st_blocks == 0
    assert os.pread(fd, 10, 4096) == b""
    assert drive.held.total_bytes == 0
    os.close(fd)


def test_a_mapping_holds_a_file_too(drive):
    import mmap

    put(drive, 1, MIB)
    fd = open_by(drive, EVIL, 1)
    mapped = mmap.mmap(fd, MIB, mmap.MAP_SHARED, mmap.PROT_READ)
    os.close(fd)
    drive.delete(key(1))
    assert drive.held.total_bytes == MIB + 4096
    mapped.close()
    drive.maintain()
    assert drive.held.total_bytes == 0


@pytest.mark.parametrize("lease", [fcntl.F_RDLCK, fcntl.F_WRLCK])
def test_a_holders_lease_delays_the_cut_and_blocks_no_thread(drive, lease):
    put(drive, 1, MIB)
    fd = open_by(drive, EVIL, 1)
    fcntl.fcntl(fd, fcntl.F_SETSIG, 23)  # SIGURG, which is ignored
    fcntl.fcntl(fd, fcntl.F_SETLEASE, lease)
    drive.delete(key(1))
    drive.held._clock.now += module.GRACE_S
    drive.maintain()
    assert drive.held.total_bytes == MIB + 4096
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    drive.maintain()
    assert drive.held.total_bytes == 0
    assert os.fstat(fd).st_blocks == 0
    os.close(fd)


def test_an_evicted_file_that_is_held_is_cut_at_the_end_of_the_process(drive):
    put(drive, 1, MIB)
    fd = open_by(drive, EVIL, 1)
    drive.delete(key(1))
    drive.held.close()
    assert os.fstat(fd).st_blocks == 0
    os.close(fd)


def test_only_a_bounded_number_of_files_is_held(drive, monkeypatch):
    monkeypatch.setattr(module, "_MAX_FILES", 4)
    fds = []
    for n in range(8):
        put(drive, n, 8192)
        fds.append(open_by(drive, EVIL, n))
        drive.delete(key(n))
    assert sum(os.fstat(fd).st_blocks > 0 for fd in fds) == 4
    for fd in fds:
        os.close(fd)


def test_held_files_cost_other_tenants_no_block(drive, monkeypatch):
    """The file system is short by exactly what is held."""
    monkeypatch.setattr(SpaceManager, "_fs_shortfall", lambda self, need: self._state.held.total_bytes)
    for n in range(10):
        put(drive, n, MIB)
    fds = [open_by(drive, EVIL, n) for n in range(5)]
    for n in range(5):
        drive.delete(key(n))
    drive.maintain()
    assert drive.held.total_bytes == 5 * (MIB + 4096)
    assert [drive.contains(key(n)) for n in range(5, 10)] == [True] * 5
    drive.held._clock.now += module.URGENT_GRACE_S
    drive.maintain()
    assert [os.fstat(fd).st_blocks for fd in fds] == [0] * 5  # the space was needed
    for fd in fds:
        os.close(fd)


def test_a_holder_of_too_much_begins_nothing_until_it_lets_go(tmp_path):
    zone, local = make_zone(tmp_path / "r", capacity=32 * MIB)
    writers = {tag: Writer(tag, "pod") for tag in (EVIL, GOOD)}

    def begin(tag, n):
        return zone.begin(writers[tag], [Wanted(key(n), 8192)], 0.0)[0]

    drive = local.drives[0]
    for n in range(3):
        put(drive, n, MIB)
    fds = [open_by(drive, EVIL, n) for n in range(3)]
    for n in range(3):
        drive.delete(key(n))
    assert local.holds_too_much(EVIL)  # 3 MiB are more than a sixteenth of the capacity
    assert not local.holds_too_much(GOOD)
    assert isinstance(begin(EVIL, 10), TierFullError)
    one = begin(GOOD, 11)
    write(one, header(11, payload(11, 8192)), payload(11, 8192))
    one.commit()
    for fd in fds:
        os.close(fd)
    assert not local.holds_too_much(EVIL)
    begin(EVIL, 12).abort()
    zone.stop()
    local.close()
