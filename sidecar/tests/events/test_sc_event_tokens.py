"""Events with the engine's blocks and their tokens: of one tenant, parents first, all again for new subscribers."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import msgspec
import pytest
from sc_nodes import Cluster, fresh_address, wait_for
from sc_raw import FINGERPRINT, SECRET
from sc_router import Curve, Subscriber

from kvpool import config
from kvpool.client import Client
from kvpool.protocol import block, keys
from kvpool.protocol.router_blocks import NO_ROUTER_BLOCKS, RouterBlocks, pack_tokens
from kvpool_sidecar.counters import Stats
from kvpool_sidecar.events.encoding import encode_batch
from kvpool_sidecar.events.feed import Event, EventFeed, EventKind, Locality
from kvpool_sidecar.events.publisher import EventEndpoint, EventPublisher

BLOCK, CHUNK = 16, 64
GROUP = bytes(4)
TAG = b"t" * 16
PUB, REPLAY = 15667, 15668
EVENTS = config.EventsConfig(enabled=True, port=PUB, replay_port=REPLAY, prompt_tokens_of="team-a")


def token_ids(prompt: int, count: int) -> list[int]:
    return [(prompt * 7919 + n * 31) % 50_000 for n in range(count * CHUNK)]


def chain(prompt: int, count: int) -> list[block.EngineBlock]:
    """A prompt's chunks of 64 tokens, in blocks of 16, as the vLLM plug-in describes them."""
    tokens, made = token_ids(prompt, count), []
    hashes = [hashlib.sha256(b"%d/%d" % (prompt, n)).digest() for n in range(count * CHUNK // BLOCK)]
    per = CHUNK // BLOCK
    for n in range(count):
        own = hashes[n * per : (n + 1) * per]
        before = hashes[n * per - 1] if n else b""
        packed = pack_tokens(tokens[n * CHUNK : (n + 1) * CHUNK])
        blocks = RouterBlocks(BLOCK, b"".join(h[-8:] for h in own), before[-8:], packed)
        made.append(block.EngineBlock(own[-1], before, GROUP, CHUNK, 0, blocks))
    return made


def header(name: block.EngineBlock, tag: bytes = TAG) -> block.BlockHeader:
    block_id = keys.block_id(FINGERPRINT, name.engine_hash, name.part)
    return block.BlockHeader(bytes(32), block_id, FINGERPRINT, tag, 10, bytes(16), 0, engine_block=name)


def key(name: block.EngineBlock) -> bytes:
    return hashlib.sha256(name.engine_hash).digest()


def feed_of(tokens_of: str = "team-a", **more) -> EventFeed:
    feed = EventFeed(Stats(), tokens_of=tokens_of, **more)
    feed.tenant(TAG, "team-a")
    feed.pop_batch(1)
    return feed


def stored(feed: EventFeed, *names: block.EngineBlock) -> None:
    for name in names:
        feed.stored(key(name), header(name))


def taken(feed: EventFeed, limit: int = 1000) -> list[Event]:
    events: list[Event] = []
    while batch := feed.pop_batch(limit)[0]:
        events += batch
    return events


def are_parents_first(events: list[Event]) -> bool:
    seen = {b""}
    for event in events:
        assert event.name is not None
        if event.name.parent_hash not in seen:
            return False
        seen.add(event.name.engine_hash)
    return True


def decode(events: list[Event], **more) -> list[dict]:
    return msgspec.msgpack.decode(encode_batch(events, 1.0, int_hashes=True, **more))[1]


def test_one_event_lists_the_blocks_of_a_whole_prompt_with_their_tokens():
    names = chain(1, 3)
    feed = feed_of()
    stored(feed, *names)
    (event,) = decode(taken(feed))
    assert event["block_hashes"] == [h for name in names for h in name.router_blocks.hash_numbers]
    assert (event["block_size"], event["parent_block_hash"]) == (BLOCK, None)
    assert event["token_ids"] == token_ids(1, 3)
    later = decode([Event(EventKind.STORED, names[2], Locality.LOCAL, "team-a", FINGERPRINT)])
    assert later[0]["parent_block_hash"] == names[1].router_blocks.hash_numbers[-1]


def test_a_removed_block_removes_each_of_the_engines_blocks():
    names = chain(2, 2)
    feed = feed_of()
    stored(feed, *names)
    taken(feed)
    feed.removed([key(names[1])], Locality.LOCAL)
    (event,) = decode(taken(feed))
    assert (event["type"], event["block_hashes"]) == ("BlockRemoved", names[1].router_blocks.hash_numbers)


def test_copies_on_the_shared_tier_have_a_medium_of_their_own():
    feed = feed_of()
    (name,) = chain(3, 1)
    stored(feed, name)
    feed.shared(key(name))
    local, shared = decode(taken(feed))
    assert [(e["medium"], e["locality"]) for e in (local, shared)] == [("STORAGE", "LOCAL"), ("SHARED", "REMOTE")]


def test_with_and_without_tokens_are_two_events():
    first, second = chain(4, 2)
    bare = replace(second, router_blocks=second.router_blocks.without_tokens())
    events = [Event(EventKind.STORED, name, Locality.LOCAL, "team-a", FINGERPRINT) for name in (first, bare)]
    assert [len(e["token_ids"]) for e in decode(events)] == [CHUNK, 0]


def test_tokens_are_published_of_the_named_tenant_only_and_no_other_tenant_is_published():
    feed = EventFeed(Stats(), tokens_of="team-a")
    feed.tenant(TAG, "team-a")
    feed.tenant(b"b" * 16, "team-b")
    (mine,), (theirs,) = chain(5, 1), chain(6, 1)
    stored(feed, mine)
    feed.stored(key(theirs), header(theirs, b"b" * 16))
    events = [event for event in taken(feed) if event.name is not None]
    assert [(e.tenant, e.name.engine_hash) for e in events if e.name] == [("team-a", mine.engine_hash)]


def test_a_pool_without_the_option_publishes_no_token_that_a_block_has_from_before():
    feed = feed_of(tokens_of="")
    stored(feed, *chain(7, 2))
    (event,) = decode(taken(feed))
    assert (len(event["block_hashes"]), event["token_ids"]) == (8, [])


@pytest.mark.parametrize("order", [[2, 1, 0], [1, 2, 0], [2, 0, 1]])
def test_a_scan_in_any_order_ends_with_parents_first(order):
    names = chain(8, 3)
    feed = feed_of()
    stored(feed, *(names[n] for n in order))
    events = taken(feed)
    last = {event.name: at for at, event in enumerate(events)}
    assert last[names[0]] < last[names[1]] < last[names[2]]
    assert len(events) <= 2 * len(names)


def test_all_again_has_parents_first_whatever_the_order_of_arrival():
    names = [*chain(9, 5), *chain(10, 4)]
    feed = feed_of()
    stored(feed, *names[::-1])
    taken(feed)
    feed.resend_present()
    events = taken(feed, 2)
    assert len(events) == len(names)
    assert are_parents_first(events)


def test_what_is_gone_leaves_no_trace_in_the_order():
    names = chain(11, 3)
    feed = feed_of()
    stored(feed, names[2], names[1])
    feed.removed([key(names[1]), key(names[2])], Locality.LOCAL)
    stored(feed, names[0])
    assert (feed.tracked_blocks, feed._keys.keys(), feed._orphans) == (1, {feed._blocks[key(names[0])].own_id}, {})
    feed.removed([key(names[0])], Locality.LOCAL)
    assert (feed._keys, feed._details) == ({}, 0)


def test_details_are_bounded_and_blocks_beyond_are_published_by_their_hash():
    names = chain(12, 3)
    feed = feed_of(max_details=2 * names[0].router_blocks.size)
    stored(feed, *names)
    events = [event.name for event in taken(feed)]
    assert [bool(name and name.router_blocks) for name in events] == [True, True, False]
    feed.removed([key(names[0])], Locality.LOCAL)
    stored(feed, *chain(13, 1))
    assert feed._details == 2 * names[0].router_blocks.size


def test_a_request_within_the_minute_is_served_when_it_is_over():
    now = [0.0]
    feed = feed_of(clock=lambda: now[0])
    now[0] = 100.0
    names = chain(14, 2)
    stored(feed, *names)
    taken(feed)
    for resend, expected in ((feed.resend_all, [None, *names]), (feed.resend_present, names)):
        resend()
        assert [event.name for event in taken(feed)] == expected
        now[0] += 30
        resend()
        resend()
        assert taken(feed) == []
        now[0] += 31
        assert [event.name for event in taken(feed)] == expected
        assert taken(feed) == []


def test_a_new_subscriber_receives_what_was_stored_before_it_came():
    feed = feed_of()
    names = chain(15, 3)
    stored(feed, *names)
    publisher = EventPublisher(EventEndpoint(fresh_address(), 0, 0, "kv@n@m"), feed, Stats(), int_hashes=True)
    try:
        publisher.start()
        wait_for(lambda: not feed.queued or None, "everything is published")
        address = publisher._pub.getsockopt_string(32).removeprefix("tcp://").rpartition(":")[0]
        with Subscriber(address, publisher.port, publisher.replay_port) as late:
            message = late.receive(10)
        assert message is not None
        assert [e["type"] for e in message.events] == ["BlockStored"]  # the others' state is not cleared
        assert message.events[0]["token_ids"] == token_ids(15, 3)
    finally:
        publisher.stop()


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    with Cluster(tmp_path_factory.mktemp("tokens"), index=False) as cluster:
        yield cluster.node("a", events=EVENTS)


def store(node, names: list[block.EngineBlock], tenant: str) -> Client:
    client = Client(config.ClientConfig(socket=str(node.sockets[tenant])), fingerprint=FINGERPRINT)
    assert client.wait_connected(10)
    block_ids = [keys.block_id(FINGERPRINT, name.engine_hash, name.part) for name in names]
    results = client.put_from(block_ids, [name.engine_hash * 2048 for name in names], engine_blocks=names)
    assert all(result.ok for result in results)
    return client


def headers_of(node) -> dict[bytes, block.EngineBlock | None]:
    files = [file for file in (node.nvme / "blocks").rglob("*") if file.is_file()]
    assert files
    found = (block.decode_header(file.read_bytes()[: block.HEADER_BYTES]) for file in files)
    return {header.engine_block.engine_hash: header.engine_block for header in found if header.engine_block}


def test_a_sidecar_requests_tokens_of_the_named_tenant_only(node):
    ours, theirs = chain(20, 3), chain(21, 2)
    clients = [store(node, ours, "team-a"), store(node, theirs, "team-b")]
    try:
        assert [client.wants_prompt_tokens for client in clients] == [True, False]
        headers = headers_of(node)
        assert [headers[name.engine_hash] for name in ours] == ours
        for name in theirs:  # a client cannot write them either
            assert headers[name.engine_hash] == replace(name, router_blocks=name.router_blocks.without_tokens())
        curve = Curve.of(*keys.events_curve_keys(SECRET.strip(), node.pool.uid, 0))
        wanted = [h for name in ours for h in name.router_blocks.hash_numbers]

        def events() -> list[dict] | None:
            with Subscriber(node.address, PUB, REPLAY, curve=curve) as s:
                found = [e for m in s.replay() for e in m.events if e["type"] == "BlockStored"]
            return found if {h for e in found for h in e["block_hashes"]} >= set(wanted) else None

        found = wait_for(events, "the prompt is published")
        assert {e["kvpool"]["tenant"] for e in found} == {"team-a"}
        assert [h for h in found[0]["block_hashes"] if h in wanted][: len(wanted)]
        assert all(e["token_ids"] for e in found)
    finally:
        for client in clients:
            client.close()


def test_a_sidecar_that_knows_no_details_gets_the_format_of_before(tmp_path):
    with Cluster(tmp_path, index=False) as cluster:
        node = cluster.node("a", events=replace(EVENTS, hashes="Bytes", prompt_tokens_of=""))
        names = chain(22, 2)
        store(node, names, "team-a").close()
        headers = headers_of(node)
        assert [headers[name.engine_hash] for name in names] == [
            replace(name, router_blocks=NO_ROUTER_BLOCKS) for name in names
        ]
