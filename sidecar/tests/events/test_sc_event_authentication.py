"""Who may read the event stream: subscribers with the routers' key, and everybody only where the pool says so."""

from __future__ import annotations

import os

import pytest
import zmq
import zmq.utils.monitor
from sc_nodes import wait_for
from sc_router import Curve, Subscriber

from kvpool.protocol import keys
from kvpool_sidecar.counters import Stats
from kvpool_sidecar.events.feed import EventFeed
from kvpool_sidecar.events.publisher import EventEndpoint, EventPublisher

KEYS = keys.events_curve_keys(b"s" * 32, "uid", 0)
ROUTER = Curve.of(*KEYS)


class Publisher:
    def __init__(self, curve_keys: tuple[bytes, bytes] | None) -> None:
        self.stats = Stats()
        feed = EventFeed(self.stats)
        self.publisher = EventPublisher(EventEndpoint("127.0.0.1", 0, 0, "kv@a@", curve_keys), feed, self.stats)
        self.publisher.start()

    def subscriber(self, curve: Curve | None) -> Subscriber:
        return Subscriber("127.0.0.1", self.publisher.port, self.publisher.replay_port, curve=curve)

    @property
    def refused(self) -> int:
        return int(self.stats.family("kv_events_lost").get("refused", 0))


@pytest.fixture
def publish():
    made: list[Publisher] = []

    def make(curve_keys: tuple[bytes, bytes] | None) -> Publisher:
        made.append(Publisher(curve_keys))
        return made[-1]

    yield make
    for one in made:
        one.publisher.stop()


def test_a_subscriber_with_the_routers_key_reads_the_stream(publish):
    with publish(KEYS).subscriber(ROUTER) as router:
        assert router.replay()[0].events == [{"type": "AllBlocksCleared"}]


def handshake_fails(subscriber: Subscriber) -> bool:
    """Whether the publisher ends the handshake of a replay socket; False if it completes."""
    asking = subscriber._socket(zmq.DEALER)
    monitor = asking.get_monitor_socket(
        zmq.EVENT_HANDSHAKE_SUCCEEDED
        | zmq.EVENT_HANDSHAKE_FAILED_AUTH
        | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        | zmq.EVENT_DISCONNECTED
    )
    try:
        asking.connect(subscriber.replays)
        assert monitor.poll(10_000), "the handshake never ended"
        return zmq.utils.monitor.recv_monitor_message(monitor)["event"] != zmq.EVENT_HANDSHAKE_SUCCEEDED
    finally:
        asking.disable_monitor()
        monitor.close()
        asking.close()


def test_a_subscriber_without_a_key_reads_nothing(publish):
    publisher = publish(KEYS)
    with publisher.subscriber(None) as stranger, publisher.subscriber(ROUTER) as router:
        assert handshake_fails(stranger)
        assert router.replay()
        assert stranger.receive(0.5) is None


def test_a_subscriber_with_a_key_of_its_own_is_refused_and_counted(publish):
    publisher = publish(KEYS)
    own = Curve.of(KEYS[0], os.urandom(32))
    with publisher.subscriber(own) as stranger, publisher.subscriber(ROUTER) as router:
        assert handshake_fails(stranger)
        wait_for(lambda: publisher.refused > 0, "the refusal is counted")
        assert router.replay()
        assert stranger.receive(0.5) is None


def test_the_key_of_an_earlier_revision_is_refused(publish):
    publisher = publish(keys.events_curve_keys(b"s" * 32, "uid", 1))
    with publisher.subscriber(ROUTER) as late:
        assert handshake_fails(late)


def test_everybody_may_subscribe_where_the_pool_turns_authentication_off(publish):
    with publish(None).subscriber(None) as anyone:
        assert anyone.replay()[0].events == [{"type": "AllBlocksCleared"}]
