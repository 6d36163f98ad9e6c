"""Routers for tests: a subscriber of KV events, and an index as llm-d's KV-cache indexer documents it.

Written against llm-d-kv-cache's docs/architecture.md and its description of the wire: topic `kv@<pod>@<model>`; batch
`[time, events, rank]` of at least three elements; hashes are numbers or bytes, of which the last eight count; blocks
are kept under keys of the indexer's own, found again by the engine's hash; an event without tokens adds a tier to a
block that an engine announced with tokens; a gap in the numbers is asked for again, and a step back means another
publisher.
"""

from __future__ import annotations

import collections
import time
from typing import Any, NamedTuple, Self

import msgspec
import zmq
from zmq.utils import z85

END = (1 << 64) - 1


class Message:
    """One batch."""

    def __init__(self, frames: list[bytes]) -> None:
        topic, number, self.payload = frames
        self.topic = topic.decode()
        assert len(number) == 8
        self.number = int.from_bytes(number, "big")
        self.time: float = 0.0
        self.events: list[dict[str, Any]] = []
        if self.number != END:
            batch = msgspec.msgpack.decode(self.payload)
            assert isinstance(batch, list)
            assert len(batch) >= 3
            self.time, self.events, self.rank = batch[:3]
            assert isinstance(self.time, float)


class Curve(NamedTuple):
    """What a router is configured with, in Z85: the Secret NAME-events has these keys."""

    server_public: bytes
    public: bytes
    secret: bytes

    @classmethod
    def of(cls, server_key: bytes, router_key: bytes) -> Self:
        secret = z85.encode(router_key)
        return cls(zmq.curve_public(z85.encode(server_key)), zmq.curve_public(secret), secret)


class Subscriber:
    """`with Subscriber(address, port, replay_port) as s:` - connected before it returns."""

    def __init__(
        self, address: str, port: int, replay_port: int, *, high_water: int = 0, curve: Curve | None = None
    ) -> None:
        self.context = zmq.Context()
        self.curve = curve
        self.sub = self._socket(zmq.SUB)
        self.sub.setsockopt(zmq.RCVHWM, high_water)
        if high_water:
            self.sub.setsockopt(zmq.RCVBUF, 4096)
        self.sub.setsockopt(zmq.SUBSCRIBE, b"kv@")
        self.sub.setsockopt(zmq.RECONNECT_IVL, 20)
        self.sub.connect(f"tcp://{address}:{port}")
        self.replays = f"tcp://{address}:{replay_port}"
        self.received: list[Message] = []

    def receive(self, seconds: float = 5.0) -> Message | None:
        """The next message, None if there is none for so long."""
        if not self.sub.poll(int(seconds * 1000)):
            return None
        self.received.append(Message(self.sub.recv_multipart()))
        return self.received[-1]

    def replay(self, start: int = 0, seconds: float = 10.0) -> list[Message]:
        """What the publisher remembers from this number on."""
        asking = self._socket(zmq.DEALER)
        asking.setsockopt(zmq.LINGER, 0)
        try:
            asking.connect(self.replays)
            asking.send_multipart([b"", start.to_bytes(8, "big")])
            messages: list[Message] = []
            until = time.monotonic() + seconds
            while True:
                assert asking.poll(max(1, int((until - time.monotonic()) * 1000))), "the replay has no end"
                empty, *frames = asking.recv_multipart()
                assert empty == b""
                message = Message(frames)
                if message.number == END:
                    return messages
                messages.append(message)
        finally:
            asking.close()

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        made = self.context.socket(kind)
        if self.curve is not None:
            made.curve_serverkey, made.curve_publickey, made.curve_secretkey = self.curve
        return made

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.context.destroy(linger=0)


def last_eight(block_hash: int | bytes) -> int:
    """As the indexer reads a hash."""
    return int.from_bytes(block_hash[-8:], "big") if isinstance(block_hash, bytes) else block_hash % (1 << 64)


class Indexer:
    """Which pod has which block on which medium."""

    def __init__(self) -> None:
        self.request_key: dict[int, int] = {}
        self.places: collections.defaultdict[int, set[tuple[str, str, str]]] = collections.defaultdict(set)
        self.next: dict[str, int] = {}
        self.unresolved = 0

    def engine_stores(self, pod: str, hashes: list[bytes], first_key: int) -> None:
        """An engine's own event, with tokens, of which the indexer makes keys."""
        for n, one in enumerate(hashes):
            self.request_key[last_eight(one)] = first_key + n
            self.places[first_key + n].add((pod, "gpu", ""))

    def hear(self, message: Message, subscriber: Subscriber) -> None:
        """Take a message in, and what was missed before it."""
        _, pod, _model = message.topic.split("@")
        expected = self.next.get(pod, 0)
        if message.number < expected:  # another publisher: forget the old one's
            self.clear(pod)
            expected = 0
        if message.number > expected:
            for missed in subscriber.replay(expected):
                if missed.number < message.number:
                    self._apply(pod, missed)
        self._apply(pod, message)
        self.next[pod] = message.number + 1

    def clear(self, pod: str) -> None:
        for places in self.places.values():
            places -= {p for p in places if p[0] == pod and p[1] != "gpu"}

    def _apply(self, pod: str, message: Message) -> None:
        for event in message.events:
            if event["type"] == "AllBlocksCleared":
                self.clear(pod)
                continue
            for one in event["block_hashes"]:
                key = self.request_key.get(last_eight(one))
                if key is None:
                    self.unresolved += 1
                    continue
                place = (pod, event["medium"].lower(), event["locality"])
                if event["type"] == "BlockStored":
                    assert event["token_ids"] == []
                    self.places[key].add(place)
                else:
                    self.places[key].discard(place)

    def blocks(self, pod: str, locality: str = "LOCAL") -> set[int]:
        """Keys of the blocks that are said to be on a pod's drive."""
        return {key for key, places in self.places.items() if (pod, "storage", locality) in places}

    def longest_prefix(self, pod: str, first_key: int, count: int) -> int:
        """Consecutive blocks from the first on, on any medium."""
        for n in range(count):
            if not any(place[0] == pod for place in self.places[first_key + n]):
                return n
        return count
