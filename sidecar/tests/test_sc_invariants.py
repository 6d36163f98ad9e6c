"""The checker of the invariants notices what it is there for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from kvpool.protocol import block
from kvpool.protocol.wire import Tier
from kvpool.results import LoadResult, StoreResult
from kvpool_testing.history import ALLOWANCE_S, History
from kvpool_testing.interpreter_lock import lets_others_run, turns_during
from kvpool_testing.residue import residue, slope, stray_files, unsettled
from kvpool_testing.stalls import TICK_S, Stalls, overlap_s
from kvpool_testing.traffic import STRIDE, Mix, Traffic, payload_into, payload_of, payload_sum_of

NAME, OTHER = b"n" * 32, b"o" * 32


class Answers:
    """In a client's place: answers what it is told to."""

    lookup_seconds = 0.1
    held: bytes | None = None
    delay_s = 0.0
    raises: type[Exception] | None = None
    too_few = False

    def load_seconds(self, _size):
        return 0.1

    def store_seconds(self, _size=0):
        return 0.1

    def lookup(self, block_ids, _deadline, exhaustive=False):
        self._fault()
        return [Tier.LOCAL] * (len(block_ids) - self.too_few)

    def get_into(self, block_ids, buffers, _deadline):
        self._fault()
        if self.held is None:
            return [LoadResult(False, Tier.MISS, "absent", 0) for _ in block_ids]
        buffers[0][:] = self.held
        return [LoadResult(True, Tier.LOCAL, "", len(self.held))]

    def put_from(self, block_ids, buffers, _deadline):
        self._fault()
        return [StoreResult(True, True, "", len(b)) for b in buffers]

    def _fault(self):
        time.sleep(self.delay_s)
        if self.raises:
            raise self.raises("told to")


@pytest.fixture
def history():
    return History()


@pytest.fixture
def answers():
    return Answers()


def invariants(history):
    return [b.invariant for b in history.broken]


def test_what_was_stored_may_come_back_or_be_missing(history, answers):
    client = history.client(answers, "a")
    client.put_from([NAME], [b"x" * 100])
    client.get_into([NAME], [bytearray(100)])
    answers.held = b"x" * 100
    assert client.get_into([NAME], [bytearray(100)])[0].ok
    assert client.lookup([NAME, OTHER]) == [Tier.LOCAL] * 2
    history.check()
    assert history.counts["load:absent"] == history.counts["load:local"] == 1


@pytest.mark.parametrize(("held", "asker", "broken"), [
    (b"y" * 100, "a", "I1"),  # other bytes
    (b"b" * 100, "a", "I3"),  # the other tenant's
    (b"x" * 100, "c", "I3"),  # no one stored it for this tenant
], ids=["bytes", "tenant", "stranger"])  # fmt: skip
def test_wrong_bytes_are_noticed(history, answers, held, asker, broken):
    history.client(answers, "a").put_from([NAME], [b"x" * 100])
    history.client(answers, "b").put_from([NAME], [b"b" * 100])
    answers.held = held
    history.client(answers, asker).get_into([NAME], [bytearray(100)])
    assert invariants(history) == [broken]
    with pytest.raises(AssertionError, match=broken):
        history.check()


def test_a_block_that_nobody_stored_is_noticed_and_another_process_may_have_stored_it(answers):
    answers.held = payload_of("a", NAME, 9000)
    alone = History()
    alone.client(answers, "a").get_into([NAME], [bytearray(9000)])
    assert invariants(alone) == ["I1"]
    knowing = History(expected=lambda tenant, block_id: block.checksum(payload_of(tenant, block_id, 9000)))
    knowing.client(answers, "a").get_into([NAME], [bytearray(9000)])
    assert invariants(knowing) == []
    knowing.client(answers, "b").get_into([NAME], [bytearray(9000)])
    assert invariants(knowing) == ["I1"]


def test_a_payload_names_its_block_and_each_stride_its_place():
    for size in (1, 5, 31, 9000, STRIDE, STRIDE + 5, 5 * STRIDE + 4096, 8 * STRIDE):
        data = payload_of("a", NAME, size)
        assert data != payload_of("b", NAME, size) or size <= 8
        strides = [data[at : at + STRIDE] for at in range(0, size, STRIDE)]
        assert all(stride[:8] == (n * STRIDE).to_bytes(8, "little")[: len(stride)] for n, stride in enumerate(strides))
        assert {stride[8:] for stride in strides} <= {strides[0][8 : len(stride)] for stride in strides}
        assert payload_sum_of("a", NAME, size) == block.checksum(data)


def test_the_traffic_makes_its_payload_without_the_interpreters_lock():
    memory = memoryview(bytearray(16 << 20))
    assert lets_others_run(lambda: payload_into(memory, "a", NAME))
    assert turns_during(lambda: memory[: 8 << 20].tobytes()) == 0


def test_a_late_call_is_noticed_and_a_stalled_scheduler_is_forgiven(answers):
    answers.delay_s = 0.1 + ALLOWANCE_S + 0.1
    with Stalls() as stalls:
        strict, kind = History(stalls), History(stalls, allowance_s=10)
        strict.client(answers, "a").lookup([NAME])
        assert stalls.worst_s < 0.1 or invariants(strict) == ["I2"]
        kind.client(answers, "a").lookup([NAME])
    assert invariants(kind) == []
    without = History()
    without.client(answers, "a").lookup([NAME])
    assert invariants(without) == ["I2"]


def test_a_witness_that_does_not_wake_counts_as_late_so_far(answers):
    answers.delay_s = 0.1 + ALLOWANCE_S + 0.1
    with Stalls() as stalls:
        os.kill(stalls.pid, signal.SIGSTOP)
        time.sleep(2 * TICK_S)
        began = time.monotonic()
        forgiven = History(stalls)
        forgiven.client(answers, "a").lookup([NAME])
        assert stalls.between(began, time.monotonic()) >= answers.delay_s
        os.kill(stalls.pid, signal.SIGCONT)
    assert invariants(forgiven) == []


def test_what_a_client_does_to_its_own_process_is_not_excused(answers):
    """A thread that holds the interpreter's lock delays every timer of its process, and none of the witness."""
    with Stalls() as stalls:
        answers.lookup = lambda *_, **__: sum(range(30_000_000)) and [Tier.LOCAL]  # holds the lock in one C call
        history = History(stalls, allowance_s=0.0)
        began = time.monotonic()
        history.client(answers, "a").lookup([NAME], began)  # due at once
        busy = time.monotonic() - began
        assert stalls.worst_s > busy / 2 or invariants(history) == ["I2"]


def test_time_for_which_a_client_was_stopped_on_purpose_is_left_out(answers):
    answers.delay_s = 0.1 + ALLOWANCE_S + 0.1
    history = History(stopped_s=lambda started, ended: ended - started)
    history.client(answers, "a").lookup([NAME])
    assert invariants(history) == []


def test_only_the_overlap_of_a_stall_counts():
    spans = [(1.0, 2.0), (3.0, 5.0)]
    assert overlap_s(spans, 0.0, 10.0) == 3.0
    assert overlap_s(spans, 1.5, 4.0) == 1.5
    assert overlap_s(spans, 2.0, 3.0) == 0.0
    assert overlap_s([], 0.0, 10.0) == 0.0


def test_what_is_raised_and_what_is_left_out_is_noticed(history, answers):
    answers.too_few = True
    history.client(answers, "a").lookup([NAME])
    answers.raises = ZeroDivisionError
    history.client(answers, "a").get_into([], [])
    assert invariants(history) == ["I4", "I4"]


def test_a_history_without_a_call_shows_nothing(history):
    with pytest.raises(AssertionError, match="nothing was checked"):
        history.check()


def test_traffic_ends_and_says_when_a_call_does_not_return(history, answers):
    traffic = Traffic(history.client(answers, "a"), b"f" * 32, Mix(block_bytes=8192), 1)
    traffic.resize(8)
    while history.counts["lookup"] < 100:
        time.sleep(0.01)
    traffic.resize(2)
    assert traffic.stop()
    history.check()
    stuck = threading.Event()
    answers.lookup = lambda *_, **__: stuck.wait(30) and []
    traffic = Traffic(history.client(answers, "a"), b"f" * 32, Mix(reads=1.0), 1)
    traffic.resize(1)
    assert not traffic.stop(0.2)
    stuck.set()
    assert traffic.stop()


def test_what_a_process_holds_is_counted(tmp_path):
    before = residue(os.getpid())
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    with (tmp_path / "gone").open("wb"), subprocess.Popen(["sleep", "60"]) as child:
        (tmp_path / "gone").unlink()
        try:
            now = residue(os.getpid())
        finally:
            child.kill()
            stop.set()
            thread.join()
    assert now.descriptors >= before.descriptors + 1
    assert now.threads == before.threads + 1
    assert now.children == before.children + 1
    assert now.deleted_files == before.deleted_files + 1
    assert now.rss_bytes > 1 << 20


CHURN = """
import threading
while True:
    for thread in [threading.Thread(target=lambda: None) for _ in range(20)]: thread.start()
"""


def test_what_a_process_holds_can_be_counted_while_its_threads_come_and_go():
    with subprocess.Popen([sys.executable, "-c", CHURN]) as child:
        try:
            for _ in range(2000):
                assert residue(child.pid).children == 0
        finally:
            child.kill()


def test_files_that_are_no_blocks_are_strays(tmp_path):
    name = "ab" * 32
    for good in ("POOL_ID", f"blocks/ab/ab/{name}", f"quarantine/{name}"):
        (tmp_path / good).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / good).touch()
    assert stray_files(tmp_path) == []
    for bad in ("tmp/x", f"blocks/ab/cd/{name}", f"blocks/ab/ab/{name}.tmp", f"blocks/{name}"):
        (tmp_path / bad).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / bad).touch()
    assert stray_files(tmp_path) == sorted(
        ["tmp/x", f"blocks/ab/cd/{name}", f"blocks/ab/ab/{name}.tmp", f"blocks/{name}"]
    )


def test_a_status_that_is_not_a_quiet_nodes_is_told(cluster):
    node = cluster(index=False).node("a")
    assert unsettled(node.status()) == []
    with node.connect():
        assert unsettled(node.status()) == ["1 clients are connected"]
        assert unsettled(node.status(), clients=1) == []
    for change, says in (
        ({"ready": False}, "not ready"),
        ({"used_bytes": 1 << 60}, "are used of"),
        ({"drives": {"nvme": "failing"}}, "failing"),
    ):
        (reason,) = unsettled({**node.status(), "clients": 0, **change})
        assert says in reason


def test_growth_is_a_slope():
    assert slope([]) == slope([(1, 5)]) == slope([(1, 5), (1, 7)]) == 0
    assert slope([(t, 3 + 2 * t) for t in range(10)]) == pytest.approx(2)
