"""What routers are told comes to what is there, whatever is lost on the way; nothing waits for a slow subscriber."""

from __future__ import annotations

import contextlib
import hashlib
import socket
import threading
import time
from dataclasses import replace

import msgspec
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from sc_nodes import fresh_address, wait_for
from sc_router import Subscriber

from kvpool.protocol import block, keys
from kvpool_sidecar.counters import Stats
from kvpool_sidecar.events.encoding import encode_batch
from kvpool_sidecar.events.feed import Event, EventFeed, EventKind, Locality, _TrackedBlock
from kvpool_sidecar.events.publisher import EventEndpoint, EventPublisher

FINGERPRINT = b"f" * 32
TAGS = {b"a" * 16: "team-a", b"b" * 16: "team-b"}


def key(n: int) -> bytes:
    return hashlib.sha256(b"key %d" % n).digest()


def name(n: int) -> block.EngineBlock:
    return block.EngineBlock(hashlib.sha256(b"hash %d" % n).digest(), b"", bytes(4), 256)


def header(n: int, tag: bytes = b"a" * 16, **changes) -> block.BlockHeader:
    made = block.BlockHeader(
        key(n), keys.block_id(FINGERPRINT, name(n).engine_hash, bytes(4)), FINGERPRINT, tag, 10, bytes(16), 1
    )
    return replace(made, engine_block=name(n), **changes)


def known_feed(**bounds) -> tuple[EventFeed, Stats]:
    stats = Stats()
    feed = EventFeed(stats, **bounds)
    for tag, tenant in TAGS.items():
        feed.tenant(tag, tenant)
    return feed, stats


def apply(view: set, events: list[Event]) -> None:
    for event in events:
        if event.kind is EventKind.CLEARED:
            view.clear()
        else:
            assert event.name is not None
            change = view.add if event.kind is EventKind.STORED else view.discard
            change((event.name.engine_hash, event.place, event.tenant))


def drain(feed: EventFeed, view: set, limit: int = 7) -> None:
    while True:
        events, gap = feed.pop_batch(limit)
        if not events and not gap and not feed.queued:
            return
        apply(view, events)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("stored"), st.integers(0, 12)),
        st.tuples(st.just("shared"), st.integers(0, 12)),
        st.tuples(st.sampled_from(["gone", "gone from shared"]), st.integers(0, 12)),
        st.tuples(st.just("take"), st.integers(1, 5)),
        st.tuples(st.just("tenant"), st.integers(0, 1)),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(STEPS, st.integers(1, 30))
def test_who_takes_every_event_in_order_knows_what_is_there(steps, max_queued):
    feed = EventFeed(Stats(), max_queued=max_queued)
    tags = list(TAGS)
    places: dict[int, set[Locality]] = {}
    named: set[bytes] = set()
    view: set = set()
    for what, n in steps:
        if what == "stored":
            feed.stored(key(n), header(n, tags[n % 2]))
            places.setdefault(n, set()).add(Locality.LOCAL)
        elif what == "shared":
            feed.shared(key(n))
            if places.get(n):
                places[n].add(Locality.SHARED)
        elif what == "tenant":
            feed.tenant(tags[n], TAGS[tags[n]])
            named.add(tags[n])
        elif what == "take":
            apply(view, feed.pop_batch(n)[0])
        else:
            place = Locality.LOCAL if what == "gone" else Locality.SHARED
            feed.removed([key(n)], place)
            places.get(n, set()).discard(place)
    drain(feed, view)
    expected = {
        (name(n).engine_hash, place, TAGS[tags[n % 2]])
        for n, some in places.items()
        for place in some
        if tags[n % 2] in named
    }
    assert view == expected
    assert feed.tracked_blocks == sum(1 for some in places.values() if some)


def test_what_finds_no_room_is_told_again_from_the_beginning():
    feed, stats = known_feed(max_queued=10)
    for n in range(100):
        feed.stored(key(n), header(n))
    events, gap = feed.pop_batch(1000)
    assert gap
    assert events[0].kind is EventKind.CLEARED
    assert stats.whole("kv_events_lost")["dropped"] > 0
    view: set = set()
    apply(view, events)
    drain(feed, view)
    assert len(view) == 100


def test_names_are_bounded_and_what_is_only_shared_gives_way():
    feed, stats = known_feed(max_blocks=10)
    view: set = set()
    for n in range(10):
        feed.stored(key(n), header(n))
    feed.stored(key(10), header(10))
    assert stats.whole("kv_events_lost") == {"too-many": 1}
    feed.shared(key(3))
    feed.removed([key(3)], Locality.LOCAL)
    assert feed.sample_shared(5) == [key(3)]
    feed.stored(key(11), header(11))
    drain(feed, view)
    assert feed.tracked_blocks == 10
    assert {h for h, _, _ in view} == {name(n).engine_hash for n in (0, 1, 2, 4, 5, 6, 7, 8, 9, 11)}


def test_shared_blocks_are_looked_at_in_turn():
    feed, _ = known_feed()
    for n in range(7):
        feed.stored(key(n), header(n))
        feed.shared(key(n))
        feed.removed([key(n)], Locality.LOCAL)
    looked = [feed.sample_shared(3) for _ in range(7)]
    assert {k for some in looked[:3] for k in some} == {key(n) for n in range(7)}
    assert all(len(some) == 3 for some in looked)


@pytest.mark.parametrize("wrong", [{"block_id": bytes(32)}, {"fingerprint": b"g" * 32}])
def test_a_false_name_is_not_told(wrong):
    feed, stats = known_feed()
    feed.stored(key(1), replace(header(1), **wrong))
    feed.stored(key(2), replace(header(2), engine_block=None))
    assert stats.whole("kv_events_lost") == {"false-name": 1, "unnamed": 1}
    assert feed.tracked_blocks == 0


def test_hashes_can_be_their_low_64_bits_and_chains_are_one_event():
    chain = [hashlib.sha256(b"%d" % n).digest() for n in range(3)]
    names = [block.EngineBlock(h, chain[n - 1] if n else b"before", b"", 16, 2) for n, h in enumerate(chain)]
    events = [Event(EventKind.STORED, one, Locality.LOCAL, "t", FINGERPRINT) for one in names]
    alone = Event(EventKind.STORED, replace(names[2], parent_hash=b""), Locality.LOCAL, "t", FINGERPRINT)
    removed = [event._replace(kind=EventKind.REMOVED) for event in events]
    reported = msgspec.msgpack.decode(
        encode_batch([*events, alone, *removed], 1.5, int_hashes=True, models={FINGERPRINT: "m"})
    )
    low = [int.from_bytes(h[-8:], "big") for h in chain]
    assert reported[0::2] == [1.5, None]
    first, second, third = reported[1]
    assert (first["block_hashes"], first["parent_block_hash"]) == (low, int.from_bytes(b"before", "big"))
    assert (first["block_size"], first["group_idx"], first["kvpool"]["model"]) == (16, 2, "m")
    assert (second["block_hashes"], second["parent_block_hash"]) == (low[2:], None)
    assert (third["type"], third["block_hashes"]) == ("BlockRemoved", low)


@contextlib.contextmanager
def publishing(feed: EventFeed, stats: Stats, **more):
    publisher = EventPublisher(EventEndpoint(fresh_address(), 0, 0, "kv@n@m"), feed, stats, **more)
    try:
        publisher.start()
        yield publisher
    finally:
        publisher.stop()


def address_of(publisher: EventPublisher) -> str:
    endpoint: str = publisher._pub.getsockopt_string(32)  # LAST_ENDPOINT
    return endpoint.removeprefix("tcp://").rpartition(":")[0]


def test_a_slow_subscriber_keeps_nobody_waiting_and_finds_what_it_missed():
    feed, stats = known_feed()
    with publishing(feed, stats, high_water=5) as publisher:
        where = address_of(publisher), publisher.port, publisher.replay_port
        with Subscriber(*where, high_water=5) as slow, Subscriber(*where) as fast:
            rounds = 0
            while not fast.sub.poll(20) or not slow.sub.poll(20):  # both are subscribed
                feed.stored(key(rounds), header(rounds))
                rounds += 1
            for first in range(rounds, rounds + 12_000, 60):
                for n in range(first, first + 60):
                    feed.stored(key(n), header(n))
                while feed.queued:  # until it is published, as a batch of its own
                    time.sleep(0.0005)
            rounds += 12_000
            # blocks of the time before the subscriptions are published again
            wait_for(lambda: not feed.queued and stats.whole("kv_events").get("stored", 0) >= rounds, "published", 60)
            heard = []
            while (message := slow.receive(0.2)) is not None:
                heard.append(message.number)
            last = publisher.status()["next"] - 1
            assert len(heard) < last + 1  # it lost some
            missed = [m for m in slow.replay(0, 30) if m.number not in set(heard)]
            assert sorted([*heard, *(m.number for m in missed)]) == list(range(last + 1))
            for message in slow.received:  # what it took in, and what was missed
                missed.append(message)
            reported = {h for m in missed for e in m.events for h in e.get("block_hashes", ())}
            assert reported == {name(n).engine_hash for n in range(rounds)}


def test_what_was_lost_shows_in_the_numbers():
    feed, stats = known_feed(max_queued=4)
    with publishing(feed, stats) as publisher:
        where = address_of(publisher), publisher.port, publisher.replay_port
        wait_for(lambda: publisher.status()["next"] == 1, "the first batch")
        with feed._lock:  # the publisher waits meanwhile
            for n in range(5):
                known = feed._blocks.setdefault(key(n), _TrackedBlock(name(n), b"a" * 16, FINGERPRINT))
                feed._add(known, Locality.LOCAL)
        feed.wake()
        wait_for(lambda: feed.queued == 0, "all is reported")
        with Subscriber(*where) as s:
            wait_for(
                lambda: len({h for m in s.replay() for e in m.events for h in e.get("block_hashes", ())}) == 5,
                "reported",
            )
            messages = s.replay()
    assert [m.number for m in messages][:2] == [0, 2]
    assert messages[1].events[0] == {"type": "AllBlocksCleared"}


def test_who_comes_too_late_for_a_replay_is_told_everything_once():
    feed, stats = known_feed()
    now = 100.0
    feed._clock = lambda: now
    with publishing(feed, stats, remembered=5) as publisher:
        for n in range(12):
            feed.stored(key(n), header(n))
            wait_for(lambda: feed.queued == 0, "published")
        wait_for(lambda: stats.whole("kv_events").get("stored") == 12, "published")
        with Subscriber(address_of(publisher), publisher.port, publisher.replay_port) as late:
            wait_for(lambda: stats.whole("kv_events")["stored"] == 24, "a new subscription is answered by all blocks")
            assert late.replay(0)[0].number > 0  # the beginning is not remembered
            wait_for(lambda: stats.whole("kv_events")["stored"] == 36, "all is reported again")
            again = late.replay(0)
            batch = next(m for m in again if any(e["type"] == "AllBlocksCleared" for e in m.events))
            before = [m.number for m in again if m.number < batch.number]
            assert before[-1] == batch.number - 2  # one was left out
            reported = [
                h for m in again if m.number >= batch.number for e in m.events for h in e.get("block_hashes", ())
            ]
            assert sorted(reported) == sorted(name(n).engine_hash for n in range(12))  # each block once
            late.replay(0)
            late.replay(0)
            assert stats.whole("kv_events")["cleared"] == 2  # not more than once a minute


@pytest.mark.parametrize("frames", [[b"x"], [b"", b"1234567"], [b"", b"123456789"], [b"", b"", b""]])
def test_a_request_that_is_none_is_passed_over(frames):
    feed, stats = known_feed()
    with (
        publishing(feed, stats) as publisher,
        Subscriber(address_of(publisher), publisher.port, publisher.replay_port) as s,
    ):
        with s.context.socket(zmq.DEALER) as odd:
            odd.setsockopt(zmq.LINGER, 0)
            odd.connect(s.replays)
            odd.send_multipart(frames)
            wait_for(lambda: stats.whole("kv_events_lost").get("bad-request"), "counted")
            assert odd.poll(0) == 0
        assert s.replay()[0].events == [{"type": "AllBlocksCleared"}]


GREETING = b"\xff" + bytes(8) + b"\x7f\3\0" + b"NULL".ljust(20, b"\0") + bytes(32)  # ZMTP 3.0, RFC 23 of ZeroMQ


@pytest.mark.parametrize("kind", [b"DEALER", b"SUB"])
def test_what_is_too_large_is_never_taken_in(kind):
    ready = b"\5READY\x0bSocket-Type" + len(kind).to_bytes(4, "big") + kind
    feed, stats = known_feed()
    with publishing(feed, stats) as publisher:
        where = address_of(publisher), publisher.port, publisher.replay_port
        port = publisher.port if kind == b"SUB" else publisher.replay_port
        with socket.create_connection((where[0], port), timeout=10) as raw:
            raw.sendall(GREETING + bytes([4, len(ready)]) + ready)
            raw.sendall(b"\2" + (1 << 40).to_bytes(8, "big"))  # a frame of a terabyte begins
            while raw.recv(1024):
                pass  # its own greeting; then it hangs up
        feed.stored(key(1), header(1))
        with Subscriber(*where) as s:
            wait_for(
                lambda: any(name(1).engine_hash in e.get("block_hashes", ()) for m in s.replay() for e in m.events),
                "reported",
            )


def test_a_port_that_is_taken_is_an_error_at_the_start():
    feed, stats = known_feed()
    with publishing(feed, stats) as publisher, pytest.raises(OSError, match="cannot be published"):
        EventPublisher(EventEndpoint(address_of(publisher), publisher.port, 0, "t"), feed, stats)


def test_stopping_ends_the_thread_and_frees_the_ports():
    feed, stats = known_feed()
    with publishing(feed, stats) as publisher:
        where = address_of(publisher), publisher.port, publisher.replay_port
        assert any(t.name == "kv-events" for t in threading.enumerate())
    wait_for(lambda: not any(t.name == "kv-events" for t in threading.enumerate()), "the thread ends")
    again = EventPublisher(EventEndpoint(*where, "t"), feed, stats)
    again.stop()
    feed.stored(key(1), header(1))  # wakes no one
