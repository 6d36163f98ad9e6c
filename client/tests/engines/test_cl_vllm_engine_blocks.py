"""What vLLM calls a store's blocks: hashes, parents by the ends of their tokens, groups apart."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvpool.engines.vllm.engine_blocks import engine_blocks
from kvpool.protocol.block import EngineBlock

TOKENS = (256, 128)


def key(n: int, group: int = 0) -> bytes:
    return bytes([n]) * 32 + group.to_bytes(4, "big")


def context(*ends: tuple[bytes, int]) -> SimpleNamespace:
    return SimpleNamespace(_offload_key_positions=dict(ends))


def test_each_block_names_the_one_before_it_in_its_group_though_it_is_not_stored_with_it() -> None:
    chain = [(key(n), 256 * (n + 1)) for n in range(4)]
    other = [(key(n, 1), 128 * (n + 1)) for n in range(3)]
    names = engine_blocks([key(2), key(3), key(0), key(2, 1)], context(*chain, *other), TOKENS)
    assert names == [
        EngineBlock(bytes([2]) * 32, bytes([1]) * 32, bytes(4), 256, 0),
        EngineBlock(bytes([3]) * 32, bytes([2]) * 32, bytes(4), 256, 0),
        EngineBlock(bytes([0]) * 32, b"", bytes(4), 256, 0),
        EngineBlock(bytes([2]) * 32, bytes([1]) * 32, b"\0\0\0\1", 128, 1),
    ]


@pytest.mark.parametrize("request_context", [None, SimpleNamespace(), context()])
def test_without_positions_there_are_no_parents(request_context: Any) -> None:
    (name,) = engine_blocks([key(5)], request_context, TOKENS)
    assert name == EngineBlock(bytes([5]) * 32, b"", bytes(4), 256, 0)


def test_a_group_that_nobody_spoke_of_has_no_tokens() -> None:
    assert engine_blocks([key(1, 7)], None, TOKENS) == [EngineBlock(bytes([1]) * 32, b"", b"\0\0\0\7", 0, 7)]


@pytest.mark.parametrize(
    ("offload_keys", "request_context"),
    [([b"abc"], None), ([bytes(40)], None), ([key(1)], SimpleNamespace(_offload_key_positions=3)), ([None], None)],
)
def test_what_makes_no_name_costs_the_names_and_nothing_else(offload_keys: Any, request_context: Any) -> None:
    assert engine_blocks(offload_keys, request_context, TOKENS) == ()
