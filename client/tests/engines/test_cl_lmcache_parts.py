"""Parts of the LMCache plug-ins that need no LMCache: tasks, inventory, client cache."""

from __future__ import annotations

import itertools
import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from cl_lmcache import until

from kvpool.engines.common.client_cache import ClientCache
from kvpool.engines.common.tasks import Tasks
from kvpool.engines.lmcache.inventory import StoredInventory

if TYPE_CHECKING:
    import pytest


def test_a_task_that_raises_has_an_outcome_and_wakes() -> None:
    woken = threading.Event()
    tasks: Tasks[str] = Tasks("t", 1, 10, woken.set, itertools.count(1))
    number = tasks.submit(lambda: str(1 // 0), "failed")
    assert woken.wait(10)
    assert tasks.take(number) == "failed"
    assert tasks.take(number) is None
    assert tasks.close(10)


def test_a_waker_that_is_gone_disturbs_nobody() -> None:
    def wake() -> None:
        raise OSError(9, "bad file descriptor")

    tasks: Tasks[str] = Tasks("t", 1, 10, wake, itertools.count(1))
    number = tasks.submit(lambda: "done", "failed")
    assert until(lambda: tasks.take(number) == "done")
    assert tasks.close(10)


def test_a_ledger_forgets_its_oldest_names() -> None:
    ledger: StoredInventory[int] = StoredInventory(3)
    assert ledger.store([(1, 10), (2, 20), (3, 30)]) == ([(1, 10), (2, 20), (3, 30)], [])
    assert ledger.store([(1, 10)]) == ([], [])  # used again: now 2 is the oldest
    assert ledger.store([(4, 40)]) == ([(4, 40)], [(2, 20)])
    assert ledger.delete([1, 9]) == [(1, 10)]
    assert ledger.is_deleted(9)
    ledger.delete([5, 6])
    assert not ledger.is_deleted(1)
    assert ledger.lost([3, 3, 8]) == [(3, 30)]
    assert ledger.page(0, 5) == ([(4, 40)], False)


def test_more_at_once_than_a_ledger_holds_is_counted_once() -> None:
    ledger: StoredInventory[int] = StoredInventory(2)
    new, gone = ledger.store([(n, 1) for n in range(5)])
    assert new == [(3, 1), (4, 1)]
    assert gone == []


def test_clients_are_made_once_up_to_a_limit_and_not_waited_for_past_the_deadline(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gate = threading.Event()
    made: list[int] = []

    def make_client(n: int) -> Any:
        made.append(n)
        gate.wait(10)
        if n == 2:
            raise OSError("no files")
        return SimpleNamespace(wait_connected=lambda seconds: True, close=lambda: None)

    clients: ClientCache[int] = ClientCache(make_client, 2)
    assert clients.get(1, time.monotonic() + 0.02) is None
    gate.set()
    one = clients.get(1, time.monotonic() + 10)
    assert one is not None
    assert clients.get(2, time.monotonic() + 10) is None
    assert clients.get(3, time.monotonic() + 10) is None  # beyond the limit
    assert clients.get(1, 0.0) is one
    assert made == [1, 2]
    assert clients.all() == [one]
    clients.close()
