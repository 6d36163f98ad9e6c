"""The current servers of an index and the slots that they own, discovered on demand."""

from __future__ import annotations

import threading
import time
from binascii import crc_hqx
from typing import TYPE_CHECKING, NamedTuple

from kvpool.errors import RetryableError
from kvpool_sidecar.index.redis_connection import ConnectionFailure, ErrorReply, RedisConnection
from kvpool_sidecar.index.redis_discovery import SLOTS, ServerDiscovery

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpool.protocol.index_url import IndexUrl
    from kvpool_sidecar.index.redis_connection import Login, Target

__all__ = ["HEADROOM", "SLOTS", "RedisServer", "ServerMap", "ServerMemory", "SlotMap", "key_slot"]

_DISCOVERY_INTERVAL_S = 30.0
_MAX_SERVERS = 1024
_MAX_TAGS = 1 << 16
_ENTRY_BYTES = 112
_MEMORY_S, _NEARLY_FULL_S = 10.0, 0.5
_NEARLY_FULL = 0.1
HEADROOM = 0.03
"""Part of a server's memory that entries leave free, for leases."""


def key_slot(name: bytes) -> int:
    """Return the Redis Cluster slot of a key: CRC16/XMODEM of the hash tag in the first braces, or of the whole key."""
    start = name.find(b"{")
    if start >= 0:
        end = name.find(b"}", start + 1)
        if end > start + 1:
            name = name[start + 1 : end]
    return crc_hqx(name, 0) % SLOTS


class ServerMemory:
    """Memory of a server when it was last asked. `free`: the part that is free, 1 without a limit of `limit` bytes."""

    def __init__(self, free: float = 1.0, limit: int = 0, asked_at: float = float("-inf")) -> None:
        self.free = free
        self._asked_at = asked_at
        # of 16 nodes that announce as fast as this one, all stop before the headroom
        self._entries_left = (free - HEADROOM) * limit / (16 * _ENTRY_BYTES) if limit else float("inf")

    def is_due(self, entries: int, now: float) -> bool:
        """Return whether to ask before `entries` more are written."""
        self._entries_left -= entries
        interval = _NEARLY_FULL_S if self.free < _NEARLY_FULL else _MEMORY_S
        return self._entries_left <= 0 or now - self._asked_at > interval


class RedisServer:
    """One master. `down`: it did not respond last time; slow connections detect its return."""

    def __init__(self, target: Target, login: Login, fast_s: float, slow_s: float) -> None:
        self.target = target
        self.fast = RedisConnection(target, login, fast_s)
        self.slow = RedisConnection(target, login, slow_s)
        self.down = False
        self.allows_info = True
        self.memory = ServerMemory()
        self._process = (0, "")  # connections that were opened before, and what identifies the process

    def process(self) -> str | None:
        """Return an identifier of the server process, if INFO is permitted. None: no reply."""
        if not self.allows_info:
            return self.slow.name
        opened, known = self._process
        if known and opened == self.slow.opened:  # no connection was opened since, so it is the same process
            return known
        answer = self.slow.execute([(b"INFO", b"server")])
        if isinstance(answer, ConnectionFailure):
            return None
        if isinstance(answer[0], ErrorReply):
            self.allows_info = False
            return self.slow.name
        line = next((line for line in bytes(answer[0]).split(b"\r\n") if line.startswith(b"run_id:")), b"")
        self._process = (self.slow.opened, self.slow.name + line.decode("ascii", "replace"))
        return self._process[1]

    def close(self) -> None:
        self.fast.close()
        self.slow.close()


class SlotMap(NamedTuple):
    """The servers and the slots that each of them owns."""

    servers: tuple[RedisServer, ...]
    owners: list[int]  # of each slot; empty: the first server has them all
    tags: tuple[str, ...]  # for each server something that makes `name + tag` one of its keys

    def owner(self, name: bytes | str | int) -> RedisServer | None:
        """Return the server of a key; None if no server owns its slot."""
        if not self.owners:
            return self.servers[0]
        owner = self.owners[key_slot(name if isinstance(name, bytes) else str(name).encode())]
        return self.servers[owner] if owner >= 0 else None

    def groups(self, names: Sequence[bytes]) -> list[tuple[RedisServer, list[bytes]]]:
        """Group keys by slot, each group with its server."""
        if not self.owners:
            return [(self.servers[0], list(names))]
        slots: dict[int, list[bytes]] = {}
        for name in names:
            slots.setdefault(key_slot(name), []).append(name)
        return [(self.servers[self.owners[slot]], group) for slot, group in slots.items() if self.owners[slot] >= 0]


class ServerMap:
    """Discovers the servers, and reuses the connections to those that stay. Thread-safe."""

    def __init__(self, url: IndexUrl, login: Login, fast_s: float, slow_s: float) -> None:
        self._url = url
        self._login = login
        self._times = (fast_s, slow_s)
        self._discovery = ServerDiscovery(url, login, slow_s)
        self._lock = threading.Lock()
        self._discovery_lock = threading.Lock()
        self._known: dict[Target, RedisServer] = {}
        self.latest: SlotMap | None = None
        self._discovered_at = float("-inf")
        self._stale = False

    @property
    def address(self) -> str:
        """The URL without its password."""
        return self._url.public

    @property
    def is_fixed(self) -> bool:
        """True for one server whose address never changes."""
        return self._url.kind in ("single", "unix")

    def mark_stale(self) -> None:
        """Discover the servers at the next call of `current`."""
        self._stale = True

    def close(self) -> None:
        """Close all connections."""
        for server in list(self._known.values()):
            server.close()

    def current(self) -> SlotMap:
        """Return the map; discover it if it is outdated. RetryableError."""
        is_old = self._stale or time.monotonic() - self._discovered_at > _DISCOVERY_INTERVAL_S
        if self.latest is None or (is_old and not self.is_fixed):
            return self.discover()
        return self.latest

    def discover(self) -> SlotMap:
        """Discover the servers. RetryableError if no server can be queried."""
        with self._discovery_lock:
            self._stale = False
            if self._url.kind == "unix":
                owned: list[tuple[Target, list[range]]] = [((self._url.path, 0), [])]
            elif self._url.kind == "single":
                owned = [(self._url.endpoints[0], [])]
            elif self._url.kind == "sentinel":
                owned = [(self._discovery.master(), [])]
            else:
                owned = self._discovery.cluster_masters(
                    [server.target for server in (self.latest.servers if self.latest else ())]
                )
            fresh = self._build(owned)
            self.latest, self._discovered_at = fresh, time.monotonic()
            with self._lock:
                gone = [self._known.pop(t) for t, s in list(self._known.items()) if s not in fresh.servers]
            for server in gone:
                server.close()
            return fresh

    def _build(self, owned: Sequence[tuple[Target, list[range]]]) -> SlotMap:
        servers = [self.server(target) for target, _ in owned]
        if any(server is None for server in servers):
            raise RetryableError("index: too many servers", where=self.address)
        if self._url.kind != "cluster":
            return SlotMap(tuple(s for s in servers if s), [], ("",))
        owners = [-1] * SLOTS
        for number, (_, ranges) in enumerate(owned):
            for slots in ranges:
                owners[slots.start : slots.stop] = [number] * len(slots)
        tags: dict[int, str] = {}
        for n in range(_MAX_TAGS):
            owner = owners[key_slot(b"{:%d}" % n)]
            if owner >= 0:
                tags.setdefault(owner, f"{{:{n}}}")
            if len(tags) == len(owned):
                break
        if len(tags) < len(owned):
            raise RetryableError("index: a server has too few slots", where=self.address)
        return SlotMap(tuple(s for s in servers if s), owners, tuple(tags[n] for n in range(len(owned))))

    def server(self, target: Target) -> RedisServer | None:
        """Return the server at this address, connected at first use; None if there are too many."""
        with self._lock:
            server = self._known.get(target)
            if server is None and len(self._known) < _MAX_SERVERS:
                server = self._known[target] = RedisServer(target, self._login, *self._times)
            return server
