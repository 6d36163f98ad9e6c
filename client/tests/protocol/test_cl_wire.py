"""The protocols' packing: what was packed is unpacked, anything else is a ProtocolError and never another exception."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.errors import ProtocolError
from kvpool.protocol import peer_wire, wire
from kvpool.protocol.fingerprint_fields import field_digests
from kvpool.transport import responses as answers
from kvpool.transport.connection import Reply


@given(
    st.sampled_from(list(wire.Op)),
    st.binary(max_size=300),
    st.integers(0, 0xFFFF),
    st.integers(0, 0xFFFFFFFF),
    st.integers(0, 255),
)
def test_packets_come_back(op: wire.Op, body: bytes, count: int, request: int, flags: int) -> None:
    head, out = wire.unpack(wire.pack(op, body, count=count, request=request, flags=flags))
    assert (head, bytes(out)) == (wire.Head(op, flags, count, request), body)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_packet_or_a_protocol_error(data: bytes) -> None:
    try:
        head, body = wire.unpack(data)
    except ProtocolError:
        return
    assert data.startswith(wire.MAGIC)
    assert wire.pack(head.op, bytes(body), count=head.items, request=head.request, flags=head.flags) == data


def test_packets_are_bounded() -> None:
    with pytest.raises(ProtocolError):
        wire.pack(wire.Op.LOOKUP, bytes(wire.MAX_PACKET))
    with pytest.raises(ProtocolError):
        wire.unpack(wire.HEADER.pack(wire.MAGIC, 1, 0, 0, 0) + bytes(wire.MAX_PACKET))


@given(st.integers(-2, wire.MAX_LOOKUP + 2), st.integers(0, 70))
def test_idents_are_split_only_if_all_fits(count: int, block_ids: int) -> None:
    body = memoryview(bytes(range(256)) * 9)[: block_ids * 32]
    if 0 < count == block_ids <= wire.MAX_BATCH:
        assert b"".join(wire.split_block_ids(body, count, wire.MAX_BATCH)) == bytes(body)
    else:
        with pytest.raises(ProtocolError):
            wire.split_block_ids(body, count, wire.MAX_BATCH)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=70),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=8,
)


@given(st.binary(max_size=300))
def test_any_bytes_are_hellos_or_protocol_errors(data: bytes) -> None:
    for kind in (wire.ClientHello, wire.ServerHello):
        with pytest.raises(ProtocolError):
            kind.unpack(data)


@given(
    st.dictionaries(
        st.sampled_from(["version", "fingerprint", "engine", "deadlines", "fields", "readable_tags"]),
        json_values,
    )
)
def test_any_json_is_a_hello_or_a_protocol_error(value: dict[str, Any]) -> None:
    import json

    data = json.dumps(value).encode()
    for kind in (wire.ClientHello, wire.ServerHello):
        try:
            kind.unpack(data)
        except ProtocolError:
            continue
        assert len(bytes.fromhex(value["fingerprint"])) == 32


def test_hellos_come_back() -> None:
    mine = wire.ClientHello(b"f" * 32, "vllm 0.33.0", "llama", fields={"sizes.tp_size": "0badcafe"})
    assert wire.ClientHello.unpack(mine.pack()) == mine
    before = wire.pack_json({"version": 1, "fingerprint": "66" * 32})  # a client that tells no fields
    assert wire.ClientHello.unpack(before).fields == {}
    theirs = wire.ServerHello(b"t" * 16, 1 << 28, "ns/pool", "node-1", {"lookup_ms": 20})
    assert wire.ServerHello.unpack(theirs.pack()) == theirs
    assert b"events" not in theirs.pack()  # as builds of before events say it
    asks = replace(theirs, events=True)
    tokens = replace(asks, router_blocks=True, prompt_tokens=True)
    assert wire.ServerHello.unpack(tokens.pack()) == tokens
    assert b"tokens" not in asks.pack()
    assert wire.ServerHello.unpack(asks.pack()) == asks
    assert not wire.ServerHello.unpack(asks.pack().replace(b"true", b'"yes"')).events
    reads = replace(mine, reads_granted=True)
    assert wire.ClientHello.unpack(reads.pack()) == reads
    assert b"reads_granted" not in mine.pack()  # as clients of before say it
    grants = replace(theirs, readable_tags=tuple(bytes([n]) * 16 for n in range(8)))
    assert wire.ServerHello.unpack(grants.pack()) == grants
    assert b"readable" not in theirs.pack()
    assert b"salt_key" not in asks.pack()
    tags = replace(theirs, salt_key=b"k" * 32)
    assert wire.ServerHello.unpack(tags.pack()) == tags
    with pytest.raises(ProtocolError, match="salt_key is not 32 bytes"):
        wire.ServerHello.unpack(tags.pack().replace(b"6b" * 32, b"6b" * 31))


@pytest.mark.parametrize(
    "tags", ["00" * 16, [0], ["00" * 15], [None], ["00" * 16] * 9, {"00" * 16: 1}, [" " + "0" * 31]]
)
def test_tags_of_other_tenants_are_few_and_whole(tags: Any) -> None:
    value = {"version": 1, "tenant_tag": "00" * 16, "max_block_bytes": 1, "readable_tags": tags}
    with pytest.raises(ProtocolError):
        wire.ServerHello.unpack(wire.pack_json(value))


def test_a_client_that_says_nothing_of_tests_counts_as_tested() -> None:
    """Clients and sidecars of other releases do not know the field."""
    untested = wire.ClientHello(b"f" * 32, is_tested=False)
    assert wire.ClientHello.unpack(untested.pack()) == untested
    assert b"tested" not in wire.ClientHello(b"f" * 32).pack()
    older = wire.pack_json({"version": 1, "fingerprint": "66" * 32, "engine": "", "model": "", "tested": "no"})
    assert wire.ClientHello.unpack(older).is_tested


def test_long_names_are_cut_in_hello() -> None:
    hello = wire.ClientHello.unpack(wire.ClientHello(b"f" * 32, "e" * 999, "m" * 9999).pack())
    assert (len(hello.engine), len(hello.model)) == (64, 256)


@pytest.mark.parametrize(
    "fields",
    [
        [],
        "x",
        {"a": 1},
        {"a": "0badcaf"},
        {"a": "0BADCAFE"},
        {"a": "0badcafe\n"},
        {"": "0badcafe"},
        {"Name": "0badcafe"},
        {"n" * 49: "0badcafe"},
        {str(i): "0badcafe" for i in range(49)},
    ],
)
def test_fields_of_facts_are_bounded(fields: Any) -> None:
    with pytest.raises(ProtocolError):
        wire.ClientHello.unpack(wire.pack_json({"version": 1, "fingerprint": "66" * 32, "fields": fields}))


facts_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=70),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=70), inner, max_size=9),
    max_leaves=200,
)


@given(st.dictionaries(st.text(max_size=70), facts_values, max_size=60))
def test_any_facts_fit_into_a_hello(inputs: dict[str, Any]) -> None:
    hello = wire.ClientHello(b"f" * 32, "e" * 64, "\N{PILE OF POO}" * 256, fields=field_digests(inputs))
    assert wire.ClientHello.unpack(hello.pack()) == hello


def test_a_field_that_differs_is_named_and_its_value_is_not_told() -> None:
    one = {"model": {"name": "secret-llama", "revision": ""}, "sizes": {"tp_size": 1}, "kv_dtype": "bfloat16"}
    other = {**one, "sizes": {"tp_size": 2}}
    mine, theirs = field_digests(one), field_digests(other)
    assert set(mine) == {"model.name", "model.revision", "sizes.tp_size", "kv_dtype"}
    assert [name for name in mine if mine[name] != theirs[name]] == ["sizes.tp_size"]
    assert "llama" not in str(mine)
    assert field_digests(dict(reversed(one.items()))) == mine


@pytest.mark.parametrize("text", ["", "ab", " " * 64, "g" * 64, "ab " * 21 + "a"])
def test_hexadecimal_fields_are_exact(text: str) -> None:
    with pytest.raises(ProtocolError):
        wire.ClientHello.unpack(wire.pack_json({"version": 1, "fingerprint": text}))


def test_json_is_bounded_and_an_object() -> None:
    with pytest.raises(ProtocolError):
        wire.pack_json({"x": "y" * wire.MAX_JSON})
    for bad in (b"[]", b"{", b"1", b"\xff", b"[" * 5000, b" " * (wire.MAX_JSON + 1)):
        with pytest.raises(ProtocolError):
            wire.unpack_json(bad)


def test_a_deadline_on_the_wire_is_never_zero() -> None:
    assert wire.pack_deadline(time.monotonic() - 9) == b"\1\0\0\0"
    assert 700 < int.from_bytes(wire.pack_deadline(time.monotonic() + 1), "little") <= 800
    assert wire.pack_deadline(float("1e18")) == b"\xff\xff\xff\xff"


def test_peer_proofs_differ_by_role_and_request_macs_by_place() -> None:
    a, b = b"a" * 32, b"b" * 32
    assert peer_wire.peer_client_proof(b"s", a, b) != peer_wire.peer_server_proof(b"s", a, b)
    assert peer_wire.peer_client_proof(b"s", a, b) != peer_wire.peer_client_proof(b"S", a, b)
    key = peer_wire.peer_session_key(b"s", a, b)
    request = peer_wire.PEER_REQUEST.pack(wire.MAGIC, wire.Op.OPEN, 0, 0, 1, a, bytes(16))
    mac = peer_wire.peer_request_mac(key, request)
    assert len(mac) == peer_wire.PEER_MAC_BYTES == 16
    for at in range(len(request) - 16):
        changed = bytearray(request)
        changed[at] ^= 1
        assert peer_wire.peer_request_mac(key, bytes(changed)) != mac


def test_a_data_address_survives_the_wire() -> None:
    for host in ("127.0.0.1", "2001:db8:ffff:ffff:ffff:ffff:ffff:ffff", "::ffff:255.255.255.255"):
        assert peer_wire.unpack_peer_address(peer_wire.pack_peer_address(host, 65535)) == (host, 65535)
    with pytest.raises(ValueError, match="46"):
        peer_wire.pack_peer_address("h" * 46, 1)
    assert len(peer_wire.unpack_peer_address(b"\xff" * peer_wire.PEER_ADDRESS.size)[0]) == 45


WINDOW = [(i, bytes([i]) * 32, memoryview(bytearray(64))) for i in range(3)]


class NoStreams:
    def __init__(self) -> None:
        self.streams: dict[int, Any] = {}

    def dial_stream(self, number: int, token: bytes, deadline: float) -> None:
        self.streams[number] = token


@given(st.integers(0, 5), st.binary(max_size=200))
def test_any_answer_to_open_is_loads_or_a_protocol_error(items: int, body: bytes) -> None:
    try:
        loads = answers.opened_loads(Reply(items, body, []), WINDOW, NoStreams(), 0.0)  # type: ignore[arg-type]
    except ProtocolError:
        return
    assert [load.index for load in loads] == [0, 1, 2]
    assert all(load.reason for load in loads)  # without descriptors nothing can be loaded


@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 4), st.integers(0, 3), st.integers(0, 70)), min_size=3, max_size=3
    ),
    st.integers(0, 4),
)
def test_lies_in_an_open_answer_are_found(entries: list[tuple[int, int, int, int]], tokens: int) -> None:
    body = b"".join(wire.OPEN_REPLY.pack(s, t, c, 0, n, bytes(32)) for s, t, c, n in entries)
    connection = NoStreams()
    try:
        loads = answers.opened_loads(Reply(3, body + bytes(16 * tokens), []), WINDOW, connection, 0.0)  # type: ignore[arg-type]
    except ProtocolError:
        assert not connection.streams
        return
    dialed = [c for s, _, c, _ in entries if s == wire.OpenStatus.STREAM_DIAL]
    assert sorted(connection.streams) == sorted(dialed)
    assert len(dialed) == tokens
    for (status, _, number, length), load in zip(entries, loads, strict=True):
        assert status in (wire.OpenStatus.MISS, wire.OpenStatus.STREAM, wire.OpenStatus.STREAM_DIAL)
        assert bool(load.reason) == (status == wire.OpenStatus.MISS or length != 64)
        assert load.reason or load.stream == number


@given(st.integers(0, 5), st.binary(max_size=150))
def test_any_answer_to_begin_is_settled_or_a_protocol_error(items: int, body: bytes) -> None:
    try:
        settled, stores = answers.begun_stores(Reply(items, body, []), WINDOW)
    except ProtocolError:
        return
    assert len(settled) == 3
    assert not stores


@pytest.mark.parametrize("body", [b"", b"\0", b"\0\0\0\0", b"\0\4\0"])
def test_answers_to_lookup_are_checked(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        answers.lookup_tiers(Reply(3, body, []), 3)
