"""Places and bytes of the landing zone: who holds them, who gives way, and what a pod cannot keep."""

from __future__ import annotations

import fcntl
import os
import time

import pytest
from sc_landing import MIB, make_zone

from kvpool.errors import RefusedError, TierFullError
from kvpool_sidecar.storage.base import CommitOutcome, WriteTransaction
from kvpool_sidecar.storage.landing.ledger import Share, WriteLedger, Writer
from kvpool_sidecar.storage.landing.zone import Wanted
from kvpool_testing.blocks import header, key, payload, write

A1, A2, B, C = Writer(b"a", "1"), Writer(b"a", "2"), Writer(b"b", "1"), Writer(b"c", "1")


@pytest.fixture
def make(tmp_path):
    made = []

    def zone(**settings):
        made.append(make_zone(tmp_path / f"r{len(made)}", **settings))
        return made[-1][0]

    yield zone
    for one, local in made:
        one.stop()
        local.close()


def begin(zone, owner, numbers, size=8192, *, wait_s=0.0):
    return zone.begin(owner, [Wanted(key(n), size) for n in numbers], time.monotonic() + wait_s)


def begun(found) -> list[WriteTransaction]:
    return [one for one in found if isinstance(one, WriteTransaction)]


# -- the ledger


def test_a_tenant_gets_three_quarters():
    ledger = WriteLedger(Share(8, 800))
    assert ledger.count(A1, [10] * 8) == 6
    assert ledger.count(A1, [100] * 8) == 6
    for _ in range(6):
        ledger.charge(A1, 10)
    assert ledger.count(A2, [10]) == 0
    assert ledger.count(B, [10] * 8) == 2
    assert ledger.count_alone([601]) == 0


def test_only_who_holds_more_gives_way():
    ledger = WriteLedger(Share(8, 800))
    for _ in range(6):
        ledger.charge(A1, 10)
    for _ in range(2):
        ledger.charge(B, 10)
    assert ledger.yielding(C, 10) == [A1, B]
    assert ledger.yielding(A1, 10) == []
    assert ledger.yielding(A2, 10) == [A1]  # its own tenant's part is full
    assert ledger.yielding(B, 10) == [A1]


def test_many_large_writes_count_as_much_as_many_places():
    ledger = WriteLedger(Share(100, 800))
    ledger.charge(A1, 600)
    for _ in range(20):
        ledger.charge(B, 10)
    assert ledger.yielding(C, 100) == [A1, B]


def test_released_shares_are_forgotten():
    ledger = WriteLedger(Share(8, 800))
    ledger.charge(A1, 10)
    ledger.release(A1, 10)
    assert ledger.tenants() == {}
    assert ledger.total == Share()


# -- the zone


def test_what_one_tenant_begins_leaves_places_for_others(make):
    zone = make(places=8)
    assert len(begun(begin(zone, A1, range(20)))) == 6
    assert len(begun(begin(zone, A2, range(20, 30)))) == 0
    assert len(begun(begin(zone, B, range(30, 40)))) == 2


def test_what_one_tenant_begins_leaves_memory_for_others(make):
    zone = make(buffer=4 * MIB)
    assert len(begun(begin(zone, A1, range(9), MIB - 4096))) == 3
    assert len(begun(begin(zone, B, range(9), MIB - 4096))) == 1


def test_the_oldest_write_of_who_holds_most_gives_way(make):
    zone = make(places=8)
    oldest, *_ = first = begun(begin(zone, A1, range(6)))
    second = begun(begin(zone, B, range(10, 12)))
    assert len(second) == 2
    assert len(begun(begin(zone, C, [20], wait_s=5.0))) == 1  # it waits until the oldest one had its time
    with pytest.raises(RefusedError, match="already ended"):
        oldest.commit()
    assert [one.claim() for one in (*first[1:], *second)] == [True] * 7
    assert zone.status()["places"] == 8


def test_a_batch_waits_for_the_writes_before_it(make):
    zone = make(places=4)
    first = begun(begin(zone, A1, range(3)))
    data = payload(0, 8192)
    for n, one in enumerate(first):
        write(one, header(n, payload(n, 8192)), payload(n, 8192))
        assert one.commit() == CommitOutcome.STORED
    assert len(begun(begin(zone, A1, range(5, 8), wait_s=5.0))) == 3
    assert data


def test_a_block_that_can_never_fit_is_refused_at_once(make):
    zone = make(buffer=MIB, capacity=64 * MIB)
    start = time.monotonic()
    (found,) = begin(zone, A1, [1], MIB, wait_s=30.0)
    assert isinstance(found, TierFullError)
    assert time.monotonic() - start < 15


def test_begin_reserves_and_evicts_nothing_on_the_drive(make):
    zone = make(capacity=4 * MIB, buffer=16 * MIB)
    for n in range(3):
        (one,) = begin(zone, B, [n], MIB)
        write(one, header(n, payload(n, MIB)), payload(n, MIB))
        one.commit()
    assert len(begun(begin(zone, A1, range(10, 22), MIB - 4096))) == 12
    zone._local.maintain()
    assert [zone._local.contains(key(n)) for n in range(3)] == [True] * 3


def test_an_abandoned_write_is_given_up(make):
    zone = make(max_age_s=0.0)
    (one,) = begin(zone, A1, [1])
    zone.maintain()
    assert not one.abort()
    assert zone.status()["bytes"] == 0


def test_memory_that_a_pod_sealed_stays_charged_to_it_until_it_lets_go(make):
    zone = make()
    (one,) = begin(zone, A1, [1], MIB)
    kept = os.open(f"/proc/self/fd/{one.reader}", os.O_WRONLY)
    fcntl.fcntl(kept, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    with pytest.raises(RefusedError, match="added seals"):
        one.commit()
    zone.maintain()
    status = zone.status()
    assert status["stuck_bytes"] == status["bytes"] == MIB + 4096
    assert status["tenants"] == {A1.tenant.hex(): {"places": 1, "bytes": MIB + 4096, "held_bytes": 0}}
    os.close(kept)
    zone.maintain()
    assert zone.status()["bytes"] == zone.status()["stuck_bytes"] == 0


def test_a_failed_begin_holds_nothing(make, monkeypatch):
    zone = make()

    def no_memory(size):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("kvpool_sidecar.storage.landing.memfd.create", no_memory)
    assert [type(one) for one in begin(zone, A1, range(3))] == [OSError] * 3
    assert zone.status()["places"] == 0


def test_a_full_drive_refuses_the_commit_and_frees_the_memory(make):
    zone = make(capacity=3 * MIB)
    (one,) = begin(zone, A1, [1], MIB)
    write(one, header(1, payload(1, MIB)), payload(1, MIB))
    zone._local.drives[0].health.fenced = True
    with pytest.raises(TierFullError, match="fenced"):
        one.commit()
    assert zone.status()["bytes"] == 0


def test_two_writers_of_one_block(make):
    zone = make()
    data = payload(1, 8192)
    writes = [begin(zone, owner, [1])[0] for owner in (A1, A2)]
    for one in writes:
        write(one, header(1, data), data)
    assert [one.commit() for one in writes] == [CommitOutcome.STORED, CommitOutcome.ALREADY_PRESENT]
    assert begin(zone, B, [1]) == [None]
