"""The demonstration without an engine: the same visits, the same data path, random blocks in place of KV.

Each node has a client of its own, with which the plug-in's work is done here: look up the prompt's blocks, load those
that are there, make the others, store them. A block's bytes follow from its name, so every loaded byte is checked. What
an engine would have needed to compute the rest is not known here and not made up.
"""

from __future__ import annotations

import hashlib
import mmap
import random
import time
from typing import TYPE_CHECKING

import numpy as np

from kvpool.client import Client
from kvpool.protocol.keys import block_id, fingerprint
from kvpool_demo.engines import KV_BYTES_PER_TOKEN
from kvpool_demo.play import Answer, play
from kvpool_demo.pool import NODE_NAMES
from kvpool_demo.processes import StartError
from kvpool_demo.results import Results
from kvpool_demo.routing import schedule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpool_demo.conversation import Conversation, Shape
    from kvpool_demo.display import Display
    from kvpool_demo.pool import Pool
    from kvpool_demo.routing import Visit

__all__ = ["Node", "run"]

CONNECT_SECONDS = 10.0
VOCABULARY = 259
LABELS = {"engine": "replay", "model": "random blocks", "kv_bytes_per_token": KV_BYTES_PER_TOKEN["bfloat16"]}


class Node:
    """What an engine and its plug-in would do on one node."""

    def __init__(self, pool: Pool, node: str, longest: int) -> None:
        self._block_tokens = pool.block_tokens
        self._block_bytes = pool.block_tokens * KV_BYTES_PER_TOKEN["bfloat16"]
        blocks = -(-longest // pool.block_tokens)
        self._memory = mmap.mmap(-1, blocks * self._block_bytes)  # as an engine's host memory: there beforehand
        view = memoryview(self._memory)
        self._slots = [view[i * self._block_bytes : (i + 1) * self._block_bytes] for i in range(blocks)]
        for slot in self._slots:
            slot[:] = bytes(self._block_bytes)
        self.fingerprint = fingerprint({**LABELS, "block_tokens": pool.block_tokens})
        self.client = Client(pool.client(node), fingerprint=self.fingerprint, labels=LABELS)
        self.equal = True
        if not self.client.wait_connected(CONNECT_SECONDS):
            raise StartError(f"no connection to the sidecar of {node}")

    def block_ids(self, tokens: Sequence[int]) -> list[bytes]:
        """Names of the full blocks of `tokens`; like an engine's, each covers all that is before it."""
        names, chain = [], b""
        for start in range(0, len(tokens) - self._block_tokens + 1, self._block_tokens):
            block = np.asarray(tokens[start : start + self._block_tokens], dtype="<i4")
            chain = hashlib.sha256(chain + block.tobytes()).digest()
            names.append(block_id(self.fingerprint, chain))
        return names

    def ask(self, visit: Visit, prompt: list[int], answer: Sequence[int]) -> Answer:
        """Serve one prompt; the time is that of lookup and load."""
        # an engine computes at least the last token of a prompt
        wanted = self.block_ids(prompt[:-1])
        began = time.monotonic()
        leading = [tier for tier in self.client.lookup(wanted) if tier]
        loaded = self.client.get_into(wanted[: len(leading)], self._slots[: len(leading)])
        wait_ms = (time.monotonic() - began) * 1000
        usable = next((i for i, result in enumerate(loaded) if not result.ok), len(loaded))
        tiers: dict[str, int] = {}
        for name, slot, result in zip(wanted, self._slots, loaded[:usable], strict=False):
            tier = result.tier.name.lower()
            tiers[tier] = tiers.get(tier, 0) + self._block_tokens
            self.equal &= bytes(slot) == self.content(name)
        # the last token of an answer has no KV yet
        self._store(self.block_ids([*prompt, *answer[:-1]])[usable:])
        return Answer(wait_ms, usable * self._block_tokens, tiers, tuple(answer))

    def content(self, name: bytes) -> bytes:
        """The bytes of a block, which follow from its name."""
        return np.random.default_rng(int.from_bytes(name[:16], "little")).bytes(self._block_bytes)

    def _store(self, names: Sequence[bytes]) -> None:
        for name, slot in zip(names, self._slots, strict=False):
            slot[:] = self.content(name)
        slots = self._slots[: len(names)]
        if len(slots) < len(names):
            raise ValueError("the prompt is longer than was said")
        for at in range(0, len(names), 16):
            self.client.put_from(names[at : at + 16], slots[at : at + 16])


def run(pool: Pool, shape: Shape, conversations: Sequence[Conversation], display: Display) -> Results:
    """The one phase that there is without an engine."""
    display.phase("Starting: a pool on three nodes")
    pool.start()
    display.say("  three sidecars, the index and the shared directory are there")
    display.phase("Replay: NO ENGINE RUNS. Each round on another node, random blocks in place of KV")
    visits, gone = schedule(shape.users, shape.rounds, len(NODE_NAMES), lost=True)
    lost = NODE_NAMES[gone] if gone is not None else ""
    nodes = [Node(pool, name, shape.longest) for name in NODE_NAMES]

    def ask(visit: Visit, prompt: list[int]) -> Answer:
        random_answer = random.Random(f"{visit.user}/{visit.round}")  # noqa: S311 - an answer, not a secret
        tokens = [random_answer.randrange(3, VOCABULARY) for _ in range(shape.answer)]
        answer = nodes[visit.node].ask(visit, prompt, tokens)
        pool.settle()
        return answer

    def lose(turn: int) -> None:
        if turn == shape.rounds - 1 and gone is not None:
            pool.stop_node(lost)
            display.say(f"  {lost} is stopped: what only it had, the shared tier has")

    try:
        on_turn = lambda turn: display.turn(turn, NODE_NAMES[turn.visit.node], "blocks loaded")  # noqa: E731
        turns = play(visits, conversations, ask, before_round=lose, on_turn=on_turn)
        counted = [node.client.stats() for node in nodes]
    finally:
        for node in nodes:
            node.client.close()
    return Results(
        engine="replay",
        nodes=len(NODE_NAMES),
        shape=shape,
        pool=turns,
        bytes_read={tier: sum(c["bytes"].get(tier, 0) for c in counted) for tier in ("local", "peer", "shared")},
        bytes_stored=sum(c["stored_bytes"].get("stored", 0) for c in counted),
        bytes_shared=pool.bytes_copied(),
        lost=lost,
        blocks_equal=all(node.equal for node in nodes),
        seconds=display.seconds,
    )
