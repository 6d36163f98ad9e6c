"""Events on ZeroMQ in vLLM's wire format.

A PUB socket (XPUB: it reports new subscribers) sends `[topic, number, payload]`: the number is 8 bytes big-endian and
counts from 0 at each start of the sidecar; the payload is that of kvpool_sidecar.events.encoding. A ROUTER socket is
queried with the number of the first batch that a subscriber needs, and replies with the buffered batches, each as
`[topic, number, payload]`, then `["", -1, ""]`. Source: vllm/distributed/kv_events.py of vLLM 0.33.

One thread owns both sockets. A slow subscriber loses batches, and detects it by the numbers. For a new subscriber all
blocks are published again, because not every router requests a replay.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import zmq

from kvpool_sidecar.events.curve import CurveAuthenticator
from kvpool_sidecar.events.encoding import encode_batch
from kvpool_sidecar.events.feed import EventKind
from kvpool_sidecar.resilience.bounded_cache import BoundedCache
from kvpool_sidecar.resilience.worker import PeriodicTask

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvpool_sidecar.counters import Stats
    from kvpool_sidecar.events.feed import Event, EventFeed

__all__ = ["EventEndpoint", "EventPublisher"]

_BATCH = 256
_REMEMBERED, _REMEMBERED_BYTES = 10_000, 64 << 20
_HIGH_WATER = 1000  # queued batches of one slow subscriber
_SEND_BUFFER = 256 << 10  # of the kernel, for each subscriber
_LARGEST_REQUEST = 1024  # bytes; the handshake of CURVE needs more than 256
_MAX_REPLAYS = 16
_REPLAY_S = 10.0  # a replay without progress is dropped
_REPLAY_TURN = 64  # batches sent before new events are published
_IDLE_MS, _BUSY_MS = 1000, 5
_GATHER_S = 0.01  # events of this period form one batch: each batch costs CPU time of the block path
_STOP_S = 2.0
_END = (-1).to_bytes(8, "big", signed=True)
_SUBSCRIBED = 1  # first byte of XPUB's message


class EventEndpoint(NamedTuple):
    """Address of the PUB socket and of the ROUTER socket for replays, and the topic of all messages. Port 0: any.

    `curve_keys`: secret keys of the sidecars and of routers (kvpool.protocol.keys.events_curve_keys); None: everybody
    may subscribe.
    """

    address: str
    port: int
    replay_port: int
    topic: str
    curve_keys: tuple[bytes, bytes] | None = None


class EventPublisher:
    """Binds immediately (OSError if an address is taken; port 0: any); publishes from `start` to `stop`."""

    def __init__(
        self,
        endpoint: EventEndpoint,
        feed: EventFeed,
        stats: Stats,
        *,
        int_hashes: bool = False,
        models: Callable[[], Mapping[bytes, str]] = dict,
        remembered: int = _REMEMBERED,
        high_water: int = _HIGH_WATER,
    ) -> None:
        self._feed = feed
        self._stats = stats
        self._topic = endpoint.topic.encode()
        self._int_hashes = int_hashes
        self._models = models
        self._next = 0
        self._replay_buffer: deque[tuple[int, bytes]] = deque()
        self._replay_buffer_bytes = 0
        self._max_replay_batches = remembered
        self._replays: BoundedCache[bytes, int] = BoundedCache(_MAX_REPLAYS, _REPLAY_S)  # next number by subscriber
        self._is_awake = False
        self._wakeup_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._context = zmq.Context(io_threads=1)
        self._authenticator: CurveAuthenticator | None = None
        try:
            if endpoint.curve_keys is not None:
                self._authenticator = CurveAuthenticator(self._context, *endpoint.curve_keys, stats)
            options: dict[int, int] = {zmq.SNDHWM: high_water, zmq.SNDBUF: _SEND_BUFFER, zmq.XPUB_VERBOSE: 1}
            self._pub = self._socket(zmq.XPUB, endpoint.address, endpoint.port, options)
            self._router = self._socket(zmq.ROUTER, endpoint.address, endpoint.replay_port, {zmq.ROUTER_MANDATORY: 1})
        except BaseException:
            self._close()
            raise
        self.port, self.replay_port = _port_of(self._pub), _port_of(self._router)
        self._poller = zmq.Poller()
        self._poller.register(self._router, zmq.POLLIN)
        self._poller.register(self._pub, zmq.POLLIN)
        self._poller.register(self._wakeup_fd, zmq.POLLIN)
        if self._authenticator is not None:
            self._poller.register(self._authenticator.socket, zmq.POLLIN)
        self._has_more = True
        self._task = PeriodicTask("kv-events", self._serve, 0.0)
        feed.wake = self._wake

    def _socket(self, kind: int, address: str, port: int, options: dict[int, int]) -> zmq.Socket[bytes]:
        made: zmq.Socket[bytes] = self._context.socket(kind)
        for option, value in options.items():  # before bind: later they have no effect
            made.setsockopt(option, value)
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.MAXMSGSIZE, _LARGEST_REQUEST)
        if self._authenticator is not None:
            self._authenticator.protect(made)
        host = f"[{address}]" if ":" in address else address
        made.setsockopt(zmq.IPV6, int(":" in address))
        try:
            made.bind(f"tcp://{host}:{port}" if port else f"tcp://{host}:*")
        except zmq.ZMQError as e:
            made.close()
            raise OSError(e.errno or 0, f"events cannot be published at {host}:{port}: {e.strerror}") from None
        return made

    def start(self) -> None:
        """Start the thread."""
        self._task.start()

    def stop(self) -> None:
        """Stop the thread; unsent events are lost, and published after the next start."""
        self._task.stop(0.0)
        self._is_awake = False
        self._wake()
        self._task.stop(_STOP_S)
        if not self._task.is_running:
            self._close()

    def status(self) -> dict[str, Any]:
        """For /status."""
        return {
            "next": self._next,
            "remembered": len(self._replay_buffer),
            "waiting": self._feed.queued,
            "known": self._feed.tracked_blocks,
        }

    def _wake(self) -> None:
        if self._is_awake:
            return
        self._is_awake = True
        with contextlib.suppress(OSError):  # closed, or already signaled
            os.eventfd_write(self._wakeup_fd, 1)

    def _close(self) -> None:
        self._feed.wake = lambda: None
        self._context.destroy(linger=0)
        news, self._wakeup_fd = self._wakeup_fd, -1
        if news >= 0:
            os.close(news)

    def _serve(self) -> None:
        """Wait for events or requests, and serve them."""
        ready = dict(self._poller.poll(0 if self._has_more else _BUSY_MS if len(self._replays) else _IDLE_MS))
        if self._wakeup_fd in ready:
            self._task.sleep(_GATHER_S)
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wakeup_fd)
            self._is_awake = False  # earlier events are published below, later ones signal again
        if self._authenticator is not None and self._authenticator.socket in ready:
            self._authenticator.serve()
        if self._router in ready:
            self._receive_requests()
        if self._pub in ready:
            self._receive_subscriptions()
        self._has_more = self._publish()
        self._replay()

    def _publish(self) -> bool:
        """Send the next events; True if there were any."""
        events, gap = self._feed.pop_batch(_BATCH)
        if gap:
            self._next += 1  # a gap shows subscribers the loss
        if not events:
            return gap
        for at in range(0, len(events), _BATCH):  # a prompt's whole chain may be longer
            self._send(events[at : at + _BATCH])
        for kind in EventKind:
            if count := sum(1 for event in events if event.kind is kind):
                self._stats.add("kv_events", kind.value, count)
        return True

    def _send(self, events: list[Event]) -> None:
        payload = encode_batch(events, time.time(), int_hashes=self._int_hashes, models=self._models())
        number, self._next = self._next, self._next + 1
        self._replay_buffer.append((number, payload))
        self._replay_buffer_bytes += len(payload)
        while len(self._replay_buffer) > self._max_replay_batches or self._replay_buffer_bytes > _REMEMBERED_BYTES:
            self._replay_buffer_bytes -= len(self._replay_buffer.popleft()[1])
        self._pub.send_multipart([self._topic, number.to_bytes(8, "big"), payload], zmq.DONTWAIT)
        self._stats.add("kv_events", "batches")

    def _receive_subscriptions(self) -> None:
        """Publish all blocks again for those who are new. They may be many: the feed does it once a minute at most."""
        with contextlib.suppress(zmq.Again):
            for _ in range(_MAX_REPLAYS):
                message = self._pub.recv(zmq.DONTWAIT)
                if message[:1] == bytes([_SUBSCRIBED]) and self._topic.startswith(message[1:]):
                    self._feed.resend_present()

    def _receive_requests(self) -> None:
        for _ in range(_MAX_REPLAYS):
            try:
                frames = self._router.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            if len(frames) != 3 or len(frames[2]) != 8:
                self._stats.add("kv_events_lost", "bad-request")
                continue
            who, _, first = frames
            start = max(0, int.from_bytes(first, "big", signed=True))
            oldest = self._replay_buffer[0][0] if self._replay_buffer else self._next
            if start < oldest:
                self._feed.resend_all()  # the missed batches are gone: publish all blocks again
            self._replays.put(who, max(start, oldest))
            self._stats.add("kv_events", "replays")

    def _replay(self) -> None:
        """Send some batches to each replaying subscriber; one that does not read is retried until its timeout."""
        for who in self._replays:
            at = self._replays.peek(who)
            if at is None:
                continue
            try:
                following = self._send_from(who, at)
            except zmq.Again:
                continue
            except zmq.ZMQError:  # gone
                following = -1
            if following < 0:
                self._replays.pop(who)
            elif following > at:
                self._replays.put(who, following)

    def _send_from(self, who: bytes, at: int) -> int:
        """Return the number to continue with; -1 at the end. zmq.Again if nothing could be sent."""
        oldest = self._replay_buffer[0][0] if self._replay_buffer else self._next
        sent = 0
        index = self._index_of(max(at, oldest))
        while index < len(self._replay_buffer):
            number, payload = self._replay_buffer[index]
            if sent == _REPLAY_TURN:
                return number
            try:
                self._router.send_multipart(
                    [who, b"", self._topic, number.to_bytes(8, "big"), payload], zmq.DONTWAIT, copy=False
                )
            except zmq.Again:
                if sent:
                    return number
                raise
            index, sent = index + 1, sent + 1
        self._router.send_multipart([who, b"", b"", _END, b""], zmq.DONTWAIT)
        return -1

    def _index_of(self, number: int) -> int:
        """Return the index of the first buffered batch with at least this number; numbers ascend, with gaps."""
        low, high = 0, len(self._replay_buffer)
        while low < high:
            middle = (low + high) // 2
            if self._replay_buffer[middle][0] < number:
                low = middle + 1
            else:
                high = middle
        return low


def _port_of(sock: zmq.Socket[bytes]) -> int:
    return int(sock.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
