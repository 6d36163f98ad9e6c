"""Routers: which node serves a request. Each node that fails is left out immediately, as by health checks."""

from __future__ import annotations

import zlib
from collections import Counter
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

    from kvpool_cli.simulator.node import SimulatedNode
    from kvpool_cli.simulator.workload import SimulatedRequest

__all__ = ["RequestRouter", "make_router"]

_SAMPLED = 2  # nodes without blocks of the prompt that a kv-aware router compares
_MIN_SHARE = 0.3  # of a prompt; less, such as a system prompt that all have, would send all prompts to a few nodes


class RequestRouter(Protocol):
    """Chooses among the nodes that work; `alive` is not empty."""

    def choose(self, request: SimulatedRequest, alive: Sequence[SimulatedNode], now: float) -> SimulatedNode:
        """Return the node for a request."""


class _Random:
    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def choose(self, request: SimulatedRequest, alive: Sequence[SimulatedNode], now: float) -> SimulatedNode:
        return alive[self._rng.randrange(len(alive))]


class _RoundRobin:
    def __init__(self) -> None:
        self._count = 0

    def choose(self, request: SimulatedRequest, alive: Sequence[SimulatedNode], now: float) -> SimulatedNode:
        self._count += 1
        return alive[(self._count - 1) % len(alive)]


class _Sticky:
    """A session stays on its node; when that fails, it moves once."""

    def __init__(self, rng: random.Random) -> None:
        self._salt = rng.randbytes(8)
        self._nodes: dict[bytes, SimulatedNode] = {}

    def choose(self, request: SimulatedRequest, alive: Sequence[SimulatedNode], now: float) -> SimulatedNode:
        node = self._nodes.get(request.session)
        if node is None or not node.alive:
            node = alive[zlib.crc32(request.session + self._salt) % len(alive)]
            self._nodes[request.session] = node
        return node


class _KvAware:
    """The shortest expected time to the first token: the wait for the engines, and computing what the node lacks.

    Candidates are the nodes that have three tenths of the prompt's blocks, by the index, and two others. Blocks count
    wherever they are in the prompt, because peers deliver what is missing before them.
    """

    def __init__(self, rng: random.Random, holders: Callable[[bytes], Sequence[int]], block_tokens: int) -> None:
        self._rng = rng
        self._holders = holders
        self._block_tokens = block_tokens

    def choose(self, request: SimulatedRequest, alive: Sequence[SimulatedNode], now: float) -> SimulatedNode:
        here = Counter(number for key in request.keys for number in self._holders(key))
        sampled = [alive[self._rng.randrange(len(alive))] for _ in range(_SAMPLED)]
        candidates = {node.number: node for node in sampled}
        least = _MIN_SHARE * len(request.keys)
        near = {number for number, count in here.items() if count >= least}
        if near:
            candidates |= {node.number: node for node in alive if node.number in near}

        def expected(node: SimulatedNode) -> float:
            missing = max(0, request.tokens - here[node.number] * self._block_tokens)
            return max(0.0, node.engine.free_at - now) + missing / node.engine.rate

        return min(candidates.values(), key=lambda node: (expected(node), node.number))


def make_router(
    name: str, rng: random.Random, holders: Callable[[bytes], Sequence[int]], block_tokens: int
) -> RequestRouter:
    """Return a router by its name. `holders`: numbers of the nodes that have a block, by the index. KeyError."""
    makers: dict[str, Callable[[], RequestRouter]] = {
        "random": lambda: _Random(rng),
        "round-robin": _RoundRobin,
        "sticky": lambda: _Sticky(rng),
        "kv-aware": lambda: _KvAware(rng, holders, block_tokens),
    }
    return makers[name]()
