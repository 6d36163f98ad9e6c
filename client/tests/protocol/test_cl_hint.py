"""Session hints on the wire: what is packed is unpacked, and nothing out of bounds is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.errors import ProtocolError
from kvpool.protocol import hint, keys, wire
from kvpool.protocol.hint import MAX_HINT_BLOCKS, MAX_SECONDS, Hint, HintKind

TAG = b"t" * 16


@given(
    st.sampled_from(list(HintKind)),
    st.integers(0, MAX_SECONDS),
    st.lists(st.binary(min_size=32, max_size=32), max_size=8),
)
def test_a_hint_is_unpacked_as_it_was_packed(kind, seconds, block_ids):
    one = Hint(kind, TAG, seconds, tuple(block_ids))
    assert Hint.unpack(memoryview(one.pack()), len(block_ids)) == one


def test_the_largest_hint_is_one_packet():
    body = Hint(HintKind.ENDED, TAG, 0, (bytes(32),) * MAX_HINT_BLOCKS).pack()
    head, rest = wire.unpack(wire.pack(wire.Op.HINT, body, count=MAX_HINT_BLOCKS))
    assert len(Hint.unpack(rest, head.items).block_ids) == MAX_HINT_BLOCKS


@given(st.binary(max_size=200), st.integers(-1, 70_000))
def test_no_bytes_are_a_hint_that_pack_would_not_produce(body, count):
    try:
        found = Hint.unpack(memoryview(body), count)
    except ProtocolError:
        return
    assert found is None or len(found.block_ids) == count


def test_a_kind_of_a_newer_client_is_no_error():
    body = bytearray(Hint(HintKind.ENDED, TAG).pack())
    body[16] = 99
    assert Hint.unpack(memoryview(body), 0) is None


def test_more_blocks_than_fit_are_not_packed():
    with pytest.raises(ProtocolError):
        Hint(HintKind.ENDED, TAG, 0, (bytes(32),) * (MAX_HINT_BLOCKS + 1)).pack()
    with pytest.raises(ProtocolError):
        Hint(HintKind.ENDED, b"short").pack()


def test_a_sessions_tag_depends_on_the_tenant_and_does_not_contain_its_name():
    secret = b"s" * 32
    one, other = (hint.session_key(secret, keys.tenant_tag(secret, tenant)) for tenant in ("one", "other"))
    digest = hint.session_digest("run-42")
    assert hint.session_tag(one, digest) != hint.session_tag(other, digest)
    assert b"run-42" not in hint.session_tag(one, digest)
    assert hint.session_digest("\ud800")  # an unpaired surrogate in JSON
    assert len({one, other, keys.salt_key(secret, keys.tenant_tag(secret, "one"))}) == 3


def test_a_client_that_knows_no_hints_reads_the_hello_of_a_sidecar_that_does():
    hello = wire.ServerHello(bytes(16), 1, session_key=b"k" * 32)
    assert wire.ServerHello.unpack(hello.pack()).session_key == b"k" * 32
    assert wire.ServerHello.unpack(wire.ServerHello(bytes(16), 1).pack()).session_key == b""


def test_the_token_for_hints_is_not_that_for_events():
    tokens = {f(b"s" * 32, "uid", n) for f in (keys.hints_token, keys.events_token) for n in (0, 1)}
    assert len(tokens) == 4
