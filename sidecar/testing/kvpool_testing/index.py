"""What every Index must do. Subclass IndexContract.

Fixtures: `index` (empty), `empty` (a call that flushes it), and `forgetting`, a second view of the same empty index
whose leases last half a second and whose nodes are forgotten after one.
"""

from __future__ import annotations

import hashlib
import time
from typing import TYPE_CHECKING

from kvpool_sidecar.index.base import Index, NodeInfo
from kvpool_sidecar.index.record import MAX_RECORDS, Record

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["A", "B", "IndexContract"]

A = NodeInfo("node-a", "127.0.0.1", 7421, 11)
B = NodeInfo("node-b", "127.0.0.2", 7421, 22)


def key(n: int) -> bytes:
    return hashlib.sha256(n.to_bytes(8, "little")).digest()


class IndexContract:
    """Tests. The lease of `index` must be at least some seconds."""

    def test_a_node_keeps_its_number_and_no_two_share_one(self, index: Index) -> None:
        a, b = index.join(A), index.join(B)
        assert a != b
        assert 0 < a <= 0xFFFF
        assert index.join(A) == a
        assert index.join(A._replace(host="127.0.0.9")) == a
        assert index.nodes([a])[a].host == "127.0.0.9"

    def test_the_members_are_those_whose_lease_holds(self, index: Index) -> None:
        assert index.members() == []
        index.join(A)
        b = index.join(B)
        assert sorted(index.members()) == [A, B]
        index.leave(b, B)
        assert index.members() == [A]

    def test_the_members_are_found_again_after_the_index_was_emptied(
        self, index: Index, empty: Callable[[], None]
    ) -> None:
        a, b = index.join(A), index.join(B)
        empty()
        assert index.members() == []
        assert index.renew(b, B)
        assert index.members() == [B]
        assert index.renew(a, A)
        assert sorted(index.members()) == [A, B]

    def test_a_number_that_another_node_holds_cannot_be_renewed(self, index: Index) -> None:
        a, b = index.join(A), index.join(B)
        assert index.renew(a, A)
        assert index.renew(b, A) is None
        assert index.nodes([a, b]) == {a: A, b: B}

    def test_the_epoch_is_the_same_for_all_until_the_index_is_emptied(
        self, index: Index, empty: Callable[[], None]
    ) -> None:
        a, b = index.join(A), index.join(B)
        epoch = index.renew(a, A)
        assert epoch
        assert index.renew(b, B) == epoch
        assert index.renew(a, A) == epoch
        empty()
        fresh = index.renew(b, B)
        assert fresh not in (None, "", epoch)
        assert index.renew(a, A) == fresh

    def test_a_node_that_left_is_not_alive(self, index: Index) -> None:
        a, b = index.join(A), index.join(B)
        index.leave(a, A)
        assert index.nodes([a, b]) == {b: B}
        index.leave(b, A)  # not its own
        assert index.nodes([b]) == {b: B}

    def test_blocks_are_found_where_they_were_announced(self, index: Index) -> None:
        index.announce([(key(n), Record(1, 1000 + n, 7)) for n in range(3)])
        index.announce([(key(1), Record(2, 1001, 8))])
        found = index.locate([key(0), key(9), key(1), key(2)])
        assert found[0] == (Record(1, 1000, 7),)
        assert found[1] == ()
        assert sorted(found[2]) == [Record(1, 1001, 7), Record(2, 1001, 8)]
        assert found[3] == (Record(1, 1002, 7),)

    def test_one_question_may_be_about_blocks_and_nodes(self, index: Index) -> None:
        a, b = index.join(A), index.join(B)
        index.announce([(key(1), Record(a, 1000, 7))])
        answer = index.query([key(1), key(2)], [b, 4711, a])
        assert answer.records == [(Record(a, 1000, 7),), ()]
        assert answer.nodes == {a: A, b: B}

    def test_many_blocks_are_found_in_their_order(self, index: Index) -> None:
        index.announce([(key(n), Record(1, 1000 + n, 7)) for n in range(0, 700, 2)])
        found = index.locate([key(n) for n in range(700)])
        assert found == [() if n % 2 else (Record(1, 1000 + n, 7),) for n in range(700)]

    def test_announcing_again_changes_nothing(self, index: Index) -> None:
        for _ in range(3):
            index.announce([(key(0), Record(1, 1000, 7)), (key(0), Record(1, 1000, 7))])
            index.announce([(key(0), Record(2, 1000, 8))])
        assert sorted(index.locate([key(0)])[0]) == [Record(1, 1000, 7), Record(2, 1000, 8)]

    def test_a_new_generation_replaces_the_old_one(self, index: Index) -> None:
        index.announce([(key(0), Record(2, 500, 1))])
        index.announce([(key(0), Record(1, 1000, 7))])
        index.announce([(key(0), Record(1, 1000, 8))])
        assert sorted(index.locate([key(0)])[0]) == [Record(1, 1000, 8), Record(2, 500, 1)]

    def test_what_one_node_withdraws_stays_with_the_other(self, index: Index) -> None:
        for node in (1, 2):
            index.announce([(key(n), Record(node, 1000, 7)) for n in range(3)])
        index.withdraw(1, [key(0), key(1), key(77)])
        assert index.locate([key(0), key(1)]) == [(Record(2, 1000, 7),)] * 2
        assert len(index.locate([key(2)])[0]) == 2
        index.withdraw(2, [key(0)])
        assert index.locate([key(0)]) == [()]

    def test_an_entry_has_few_holders_and_one_withdrawal_takes_out_one(self, index: Index) -> None:
        for _ in range(3):
            for node in range(1, 101):
                index.announce([(key(0), Record(node, 1000, 7))])
        holders = {r.node for r in index.locate([key(0)])[0]}
        assert len(holders) == MAX_RECORDS
        gone = holders.pop()
        index.withdraw(gone, [key(0)])
        assert {r.node for r in index.locate([key(0)])[0]} == holders
        index.announce([(key(0), Record(4711, 1000, 7))])
        assert {r.node for r in index.locate([key(0)])[0]} == holders | {4711}

    def test_nothing_asked_is_nothing_answered(self, index: Index) -> None:
        index.announce([])
        index.withdraw(1, [])
        assert index.locate([]) == []
        assert index.nodes([]) == {}
        assert index.nodes([5, 6]) == {}

    def test_the_roster_has_all_living_nodes(self, index: Index) -> None:
        assert index.live_nodes().nodes == {}
        a, b = index.join(A), index.join(B)
        assert index.live_nodes().nodes == {a: A, b: B}
        index.leave(a, A)
        assert index.live_nodes().nodes == {b: B}

    def test_entries_of_a_node_that_never_returns_are_swept_once(self, forgetting: Index) -> None:
        index = forgetting
        a, b = index.join(A), index.join(B)
        looked: list[int] = []

        def pace(count: int) -> bool:
            looked.append(count)
            return True

        for node, numbers in ((a, range(700)), (b, range(650, 720))):
            index.announce([(key(n), Record(node, 1000, 7)) for n in numbers])
        assert index.expire(b, pace) == 0  # everybody is alive
        assert sum(looked) >= 720
        removed = 0
        until = time.monotonic() + 20
        while not removed and time.monotonic() < until:
            if index.renew(b, B) is None:
                b = index.join(B)
            removed = index.expire(b, pace)
            time.sleep(0.05)
        assert removed == 700
        assert index.locate([key(n) for n in range(720)]) == [()] * 650 + [(Record(b, 1000, 7),)] * 70
        looked.clear()
        assert index.expire(b, pace) == 0
        assert looked == []  # not again so soon

    def test_a_sweep_can_be_ended_and_is_taken_up_by_another_node(self, forgetting: Index) -> None:
        index = forgetting
        b = index.join(B)
        index.announce([(key(n), Record(4711, 1000, 7)) for n in range(2000)])  # of a node that never was
        first = index.expire(b, lambda _: False)
        assert 0 < first < 2000
        removed = first
        until = time.monotonic() + 20
        while removed < 2000 and time.monotonic() < until:
            removed += index.expire(b, lambda _: True)
            time.sleep(0.05)
        assert removed == 2000
        assert index.locate([key(0), key(1999)]) == [(), ()]
