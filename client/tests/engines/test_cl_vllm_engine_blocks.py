"""What vLLM calls a store's blocks: hashes, parents by the ends of their tokens, groups apart."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvpool.engines.vllm.engine_blocks import BlockLayout, engine_blocks
from kvpool.engines.vllm.recorded_request import _recording
from kvpool.protocol.block import EngineBlock
from kvpool.protocol.router_blocks import RouterBlocks

TOKENS = BlockLayout((256, 128))
LAYOUT = BlockLayout((256, 128), (64, 64), 32)


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


class Context(SimpleNamespace):
    """As vLLM's ReqContext keeps state."""

    def set_state(self, value: Any) -> None:
        self.state = value

    def get_state(self, _kind: type) -> Any:
        return getattr(self, "state", None)


def hash_of(n: int) -> bytes:
    """Hash of the request's n-th 32 tokens."""
    return bytes([n + 1]) * 32


def recorded(tokens: int = 600, **request: Any) -> Context:
    """The context of a request, as vLLM's scheduler makes it with our wrapper in place."""
    held = SimpleNamespace(
        block_hashes=[hash_of(n) for n in range(tokens // 32)], all_token_ids=list(range(tokens)), **request
    )
    context = _recording(lambda _request: Context(_offload_key_positions={}))(held)
    for group, size in enumerate(LAYOUT.chunk_tokens):
        for end in range(size, tokens + 1, size):
            context._offload_key_positions[chunk(end, group)] = end
    return context


def chunk(end: int, group: int = 0) -> bytes:
    return hash_of(end // 32 - 1) + group.to_bytes(4, "big")


def test_a_chunk_lists_each_of_the_engines_blocks() -> None:
    first, second, other = engine_blocks([chunk(256), chunk(512), chunk(128, 1)], recorded(), LAYOUT)
    assert first is not None
    assert second is not None
    assert other is not None
    assert first.router_blocks == RouterBlocks(64, b"".join(hash_of(n)[-8:] for n in (1, 3, 5, 7)))
    assert second.router_blocks == RouterBlocks(64, b"".join(hash_of(n)[-8:] for n in (9, 11, 13, 15)), hash_of(7)[-8:])
    assert other.router_blocks == RouterBlocks(64, b"".join(hash_of(n)[-8:] for n in (1, 3)))
    assert (second.engine_hash, second.parent_hash) == (hash_of(15), hash_of(7))


def test_tokens_are_those_of_the_chunk_and_only_if_requested() -> None:
    (second,) = engine_blocks([chunk(512)], recorded(), LAYOUT, with_tokens=True)
    assert second is not None
    assert second.router_blocks.token_numbers == list(range(256, 512))
    (bare,) = engine_blocks([chunk(512)], recorded(), LAYOUT)
    assert bare is not None
    assert bare.router_blocks == second.router_blocks.without_tokens()


@pytest.mark.parametrize("more", [{"cache_salt": "s"}, {"lora_request": 1}, {"mm_features": [1]}])
def test_a_request_whose_hashes_depend_on_more_than_tokens_gives_no_tokens(more: dict[str, Any]) -> None:
    (first,) = engine_blocks([chunk(256)], recorded(**more), LAYOUT, with_tokens=True)
    assert first is not None
    assert (first.router_blocks.count, first.router_blocks.token_ids) == (4, b"")


def test_tokens_that_a_header_cannot_hold_are_left_out() -> None:
    large = BlockLayout((2048,), (64,), 32)
    context = recorded(4096)
    context._offload_key_positions = {chunk(2048): 2048}
    (first,) = engine_blocks([chunk(2048)], context, large, with_tokens=True)
    assert first is not None
    assert (first.router_blocks.count, first.router_blocks.token_ids) == (32, b"")


@pytest.mark.parametrize(
    ("layout", "end"),
    [(BlockLayout((256, 128), (64, 64), 0), 256), (BlockLayout((256, 128), (48, 64), 32), 256), (TOKENS, 256)],
)
def test_blocks_that_do_not_fit_the_hashes_are_left_out(layout: BlockLayout, end: int) -> None:
    (name,) = engine_blocks([chunk(end)], recorded(), layout, with_tokens=True)
    assert name is not None
    assert not name.router_blocks


def test_a_chunk_that_is_not_the_requests_has_no_blocks() -> None:
    context = recorded()
    context._offload_key_positions = {key(99): 256}
    (name,) = engine_blocks([key(99)], context, LAYOUT, with_tokens=True)
    assert name is not None
    assert not name.router_blocks
