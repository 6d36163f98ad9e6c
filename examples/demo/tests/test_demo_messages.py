"""The packets between the demo and its engines."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest
from kvpool_demo.messages import (
    MAX_PACKET,
    Channel,
    Done,
    Failed,
    Generate,
    Generated,
    Idle,
    ProtocolError,
    Start,
    Started,
    pack,
    unpack,
)

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    here, there = Channel.pair()
    other = Channel(there)
    yield here, other
    here.close()
    other.close()


@pytest.mark.parametrize(
    "message",
    [
        Generate([3, 4, 258], 48),
        Generated(12.5, 99, [1, 2], 256, {"peer": 256}),
        Start("pool-node-a", "/tmp/log", {"seed": 0, "kv_transfer_config": {"a": [1]}}, {"A": "b"}),
        Done({"tokens": {"peer": 5}}),
    ],
)
def test_a_message_arrives_as_it_was_sent(message: object):
    assert unpack(pack(message)) == message


@pytest.mark.parametrize(
    "body",
    [
        "nonsense",
        [],
        {"kind": "Nobody"},
        {"kind": "Generate", "prompt": ["3"], "max_tokens": 1},
        {"kind": "Generate", "prompt": [True], "max_tokens": 1},
        {"kind": "Generate", "prompt": [3], "max_tokens": "1"},
        {"kind": "Generate", "prompt": [3]},
        {"kind": "Idle", "timeout_s": 1, "more": 2},
        {"kind": "Idle", "timeout_s": True},
    ],
)
def test_anything_else_is_refused(body: object):
    with pytest.raises(ProtocolError):
        unpack(json.dumps(body).encode())


def test_bytes_that_are_no_json_are_refused():
    with pytest.raises(ProtocolError):
        unpack(b"\x80\x04")


def test_a_message_that_is_too_large_is_not_sent():
    with pytest.raises(ValueError, match="limit"):
        pack(Generate([1] * MAX_PACKET, 1))


def test_the_longest_prompt_goes_through(ends: tuple[Channel, Channel]):
    here, other = ends
    prompt = Generate([258] * 8192, 48)
    here.send(prompt)
    assert other.receive(5) == prompt


def test_a_descriptor_comes_along(ends: tuple[Channel, Channel]):
    here, other = ends
    read, write = os.pipe()
    here.send(Start("e", "log", {}, {}), write)
    os.close(write)
    message, descriptor = other.receive_with_descriptor()
    assert message.name == "e"
    assert descriptor is not None
    os.write(descriptor, b"x")
    os.close(descriptor)
    assert os.read(read, 2) == b"x"
    os.close(read)


def test_the_end_of_the_other_side_is_an_error(ends: tuple[Channel, Channel]):
    here, other = ends
    other.close()
    with pytest.raises(ConnectionError):
        here.receive(5)


def test_a_failure_is_raised_and_a_wrong_answer_refused(ends: tuple[Channel, Channel]):
    here, other = ends
    other.send(Failed("no room"))
    with pytest.raises(RuntimeError, match="no room"):
        here.ask(Idle(1), Done, 5)
    other.send(Started(1))
    with pytest.raises(ProtocolError, match="instead of Done"):
        here.ask(Idle(1), Done, 5)
