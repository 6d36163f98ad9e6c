"""Self-test of the pool on an untested vLLM: one private block is stored and loaded before the first hit.

It runs in the background, so the engine's start does not wait for it; until it is over, lookups are misses. The block
has a random id, so no engine asks for it. Needs no vLLM.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Final

from kvpool.engines.common.self_test import SelfTest, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpool.client import Client

__all__ = ["BackgroundSelfTest", "region_problem"]

_log = logging.getLogger("vllm.kvpool")
_ATTEMPTS: Final = 3
_POLL_S: Final = 0.05


class BackgroundSelfTest:
    """Result of the test. `is_passed` may be read by any thread.

    A pool that refuses or loses the block three times proves nothing, so only an error or wrong bytes fail the test.
    """

    def __init__(self, client: Client | None, on_failure: Callable[[str], None], *, is_needed: bool) -> None:
        self.is_passed = not is_needed
        self._closed = threading.Event()
        self._on_failure = on_failure
        if is_needed and client is not None:
            threading.Thread(target=self._run, args=(client,), name="kvpool-self-test", daemon=True).start()

    def close(self) -> None:
        """Stop the test. Does not wait for it."""
        self._closed.set()

    def _run(self, client: Client) -> None:
        for _ in range(_ATTEMPTS):
            while not client.connected:
                if self._closed.wait(_POLL_S):
                    return
            verdict = SelfTest().run_now(client)
            if verdict is Verdict.FAILED:
                self._on_failure("the self-test failed: a block did not come back as it was stored")
                return
            if verdict is Verdict.PASSED:
                break
        self.is_passed = True


def region_problem(region: memoryview, slot_bytes: int) -> str:
    """Return why slots of vLLM's host tier cannot be addressed, "" if they can. Leaves its bytes as they are.

    `region`: two-dimensional, of items of any size, one row of `slot_bytes` per chunk, as a tier is constructed with.
    """
    if region.ndim != 2 or region.readonly or not region.c_contiguous:
        return "vLLM's host tier is not a writable table of chunks"
    rows, columns = region.shape or (0, 0)
    if slot_bytes <= 0 or rows * slot_bytes != region.nbytes or columns * region.itemsize != slot_bytes:
        return "the chunks of vLLM's host tier do not follow each other"
    return ""
