"""Helpers of the LMCache tests: keys, memory objects, and a server that drives the L2 adapter as LMCache does."""

from __future__ import annotations

import select
import threading
import time
from typing import TYPE_CHECKING, Any

import cl_lmcache_stub as stub

if TYPE_CHECKING:
    from collections.abc import Callable

SIZE = 4096
PATIENT = {"lookup_ms": 2000, "load_min_ms": 3000, "breaker_failures": 1000}
GROUPS = {n: stub.Layout([(2, 2, SIZE // 16, 2)], ["bfloat16"]) for n in range(3)}


def until(condition: Any, seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.002)
    return False


def key(n: int, **more: Any) -> stub.ObjectKey:
    return stub.ObjectKey(n.to_bytes(32, "big"), **more)


def filled(n: int, size: int = SIZE, **more: Any) -> stub.Memory:
    memory = stub.Memory(size, **more)
    memory.data[:] = (n + 1).to_bytes(8, "big") * (size // 8)
    return memory


class Server:
    """Does with an adapter what LMCache's controllers do: submits, polls the descriptor, fetches each outcome once."""

    def __init__(self, adapter: Any) -> None:
        self.adapter = adapter
        self.stored: dict[int, Any] = {}
        self.lock = threading.Lock()

    def wait(self, descriptor: int, fetch: Callable[[], Any], seconds: float = 15.0) -> Any:
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            poller.poll(50)  # several threads wait here: another one's signal may be ours
            outcome = fetch()
            if outcome is not None:
                return outcome
        raise AssertionError("no outcome")

    def store(self, keys: list[Any], objects: list[Any]) -> int:
        task = self.adapter.submit_store_task(keys, objects)

        def fetch() -> Any:
            with self.lock:
                for number, result in self.adapter.pop_completed_store_tasks().items():
                    assert number not in self.stored
                    self.stored[number] = result
                return self.stored.get(task)

        return self.wait(self.adapter.get_store_event_fd(), fetch)

    def lookup(self, *keys: Any, groups: Any = GROUPS) -> list[bool]:
        task = self.adapter.submit_lookup_and_lock_task(list(keys), groups)
        found = self.wait(
            self.adapter.get_lookup_and_lock_event_fd(), lambda: self.adapter.query_lookup_and_lock_result(task)
        )
        assert self.adapter.query_lookup_and_lock_result(task) is None
        assert found.size == len(keys)
        return found.found()

    def load(self, keys: list[Any], objects: list[Any]) -> list[bool]:
        task = self.adapter.submit_load_task(keys, objects)
        found = self.wait(self.adapter.get_load_event_fd(), lambda: self.adapter.query_load_result(task))
        assert self.adapter.query_load_result(task) is None
        assert found.size == len(keys)
        self.adapter.submit_unlock(keys)
        return found.found()
