"""Rate at which a vLLM computes prompts, from the blocks that it offers in each step of its scheduler. Needs no vLLM.

Blocks are offered some steps after they were computed, so the longest of the last steps counts as their time.
The rate is that under the present load, which is what a request would wait for.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvpool.client import Client

__all__ = ["PrefillMeter"]

_STEPS = 4
_MIN_TOKENS = 256  # fewer may be generated ones
_LONGEST_S = 5.0  # a longer step was a pause of the engine


class PrefillMeter:
    """Called by the scheduler's thread only. An engine with several cache groups is not measured."""

    def __init__(
        self,
        client: Callable[[], Client | None],
        tokens_of_groups: Sequence[int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._tokens_per_block = tokens_of_groups[0] if len(tokens_of_groups) == 1 else 0
        self._clock = clock
        self._offered = 0
        self._last: float | None = None
        self._steps: deque[float] = deque(maxlen=_STEPS)

    def offered(self, blocks: int) -> None:
        """Count blocks that were offered in this step."""
        self._offered += blocks

    def step_ended(self) -> None:
        """End a step."""
        now = self._clock()
        last, self._last = self._last, now
        tokens, self._offered = self._offered * self._tokens_per_block, 0
        if last is None or now - last > _LONGEST_S:
            self._steps.clear()
            return
        self._steps.append(now - last)
        client = self._client()
        if client is not None and tokens >= _MIN_TOKENS and len(self._steps) == _STEPS:
            client.count_computed(tokens, max(self._steps))
