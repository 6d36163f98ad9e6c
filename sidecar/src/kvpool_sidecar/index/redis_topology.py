"""The servers of one index: a single Redis, the master that Sentinel reports, or the masters of a Cluster.

Reads (fast connections) never run discovery, except the first one: the part of an unavailable server is missing in the
result. All other commands (slow connections: heartbeats, announcements) discover the current servers. In a Cluster,
commands are grouped by slot and sent to all masters at the same time.
"""

from __future__ import annotations

import threading
import time
from binascii import crc_hqx
from typing import TYPE_CHECKING, NamedTuple

from kvpool.errors import RetryableError
from kvpool_sidecar.index.base import IndexFullError
from kvpool_sidecar.index.redis_connection import ConnectionFailure, ErrorReply, Redirect, RedisConnection, execute_all
from kvpool_sidecar.index.redis_discovery import SLOTS, ServerDiscovery

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvpool.protocol.index_url import IndexUrl
    from kvpool_sidecar.index.redis_connection import Command, Login, Reply, Target

__all__ = ["SLOTS", "RedisServer", "RedisTopology", "key_slot"]

_DISCOVERY_INTERVAL_S = 30.0
_MOVING = {"READONLY", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "MOVED"}
_CLUSTERED = {"MOVED", "CROSSSLOT"}
_HEADROOM = 0.03
_MAX_SERVERS = 1024
_MAX_TAGS = 1 << 16


def key_slot(name: bytes) -> int:
    """Return the Redis Cluster slot of a key: CRC16/XMODEM of the hash tag in the first braces, or of the whole key."""
    start = name.find(b"{")
    if start >= 0:
        end = name.find(b"}", start + 1)
        if end > start + 1:
            name = name[start + 1 : end]
    return crc_hqx(name, 0) % SLOTS


class RedisServer:
    """One master. `down`: it did not respond last time; slow connections detect its return."""

    def __init__(self, target: Target, login: Login, fast_s: float, slow_s: float) -> None:
        self.target = target
        self.fast = RedisConnection(target, login, fast_s)
        self.slow = RedisConnection(target, login, slow_s)
        self.down = False
        self.allows_info = True
        self.free = 1.0  # free part of its memory at the last check

    def close(self) -> None:
        self.fast.close()
        self.slow.close()


class _SlotMap(NamedTuple):
    servers: tuple[RedisServer, ...]
    owners: list[int]  # of each slot; empty: the first server has them all
    tags: tuple[str, ...]  # for each server something that makes `name + tag` one of its keys


class RedisTopology:
    """Thread-safe. RetryableError for temporary failures, IndexFullError if a server has no memory left."""

    def __init__(self, url: IndexUrl, login: Login, fast_s: float, slow_s: float) -> None:
        self._url = url
        self._login = login
        self._times = (fast_s, slow_s)
        self._discovery = ServerDiscovery(url, login, slow_s)
        self._lock = threading.Lock()
        self._discovery_lock = threading.Lock()
        self._known: dict[Target, RedisServer] = {}
        self._map: _SlotMap | None = None
        self._discovered_at = float("-inf")
        self._stale = False

    @property
    def address(self) -> str:
        return self._url.public

    @property
    def is_fixed(self) -> bool:
        """True for one server whose address never changes."""
        return self._url.kind in ("single", "unix")

    def read(self, names: Sequence[bytes]) -> list[bytes | ConnectionFailure | None]:
        """Read values; ConnectionFailure for those of an unavailable server. RetryableError if all are unavailable."""
        known = self._map or self._discover()
        if not known.owners:
            question = [(known.servers[0].fast, [(b"MGET", *names)])]
            (answer,) = execute_all(question)
            if isinstance(answer, ConnectionFailure) and answer.ended:
                (answer,) = execute_all(question)  # closed at a password change: retry once
            if isinstance(answer, ConnectionFailure):
                self._mark(known.servers[0], is_down=True)
                raise RetryableError(answer.reason)
            self._check(answer)
            values: list[bytes | ConnectionFailure | None] = answer[0]
            return values
        values = self._route(known, [(b"GET", name) for name in names], fast=True)
        self._check(values)
        if all(isinstance(value, ConnectionFailure) for value in values):
            raise RetryableError("index: no server answers", where=self.address)
        return values

    def execute(self, commands: Sequence[Command], *, partly: bool = False) -> list[Reply]:
        """Execute each command on the server of its first key, in parallel; the replies in order.

        All or an error; with `partly`, ConnectionFailure for the commands of an unavailable server, unless all are.
        """
        replies = self._route(self._current_map(), commands, fast=False)
        broken = [r for r in replies if isinstance(r, ConnectionFailure)]
        if broken and (not partly or len(broken) == len(replies)):
            raise RetryableError(broken[0].reason)
        self._check(replies)
        return replies

    def update(self, names: Sequence[bytes], edit: Callable[[bytes], bytes]) -> list[RedisServer]:
        """Replace values by `edit(value)`; b"" deletes the key. Best effort against concurrent writers.

        Returns the unavailable servers; RetryableError if all are.
        """
        groups = self._groups(self._current_map(), names)
        away: dict[RedisServer, RetryableError] = {}
        for server, group in groups:
            if server in away:
                continue
            try:
                if not self._update(server, group, edit) and len(group) > 1:
                    for name in group:  # a concurrent write: retry each key once
                        self._update(server, [name], edit)
            except IndexFullError:
                raise
            except RetryableError as e:
                self._mark(server, is_down=True)
                away[server] = e
        if away and all(server in away for server, _ in groups):
            raise next(iter(away.values()))
        return list(away)

    def require_memory(self, names: Iterable[bytes]) -> None:
        """Raise IndexFullError if a server of these keys is nearly full: the rest is reserved for leases."""
        known = self._current_map()
        servers = {_owner(known, (b"", name)) for name in names} if known.owners else {known.servers[0]}
        asked = [s for s in servers if s is not None and s.allows_info]
        for server, answer in zip(asked, execute_all([(s.slow, [(b"INFO", b"memory")]) for s in asked]), strict=True):
            if isinstance(answer, ConnectionFailure):
                continue
            server.allows_info = not isinstance(answer[0], ErrorReply)
            server.free = _free(answer[0]) if server.allows_info else 1.0
        if any(s is not None and s.free < _HEADROOM for s in servers):
            raise IndexFullError("index: its memory is nearly full", where=self.address)

    def scan(self, server: RedisServer, cursor: bytes, count: int) -> tuple[bytes, list[bytes]]:
        """Return the next cursor and about `count` keys of one server. RetryableError."""
        answer = server.slow.execute([(b"SCAN", cursor, b"COUNT", count)])
        if isinstance(answer, ConnectionFailure):
            self._mark(server, is_down=True)
            raise RetryableError(answer.reason)
        self._check(answer)
        return answer[0][0], answer[0][1]

    def servers(self) -> list[tuple[RedisServer, str]]:
        """Return every server with a tag such that `name + tag` is a key of that server."""
        known = self._current_map()
        return list(zip(known.servers, known.tags, strict=True))

    def target_of(self, name: bytes) -> Target | None:
        """Return the server of a key, if it is known."""
        server = _owner(self._map, (b"", name)) if self._map is not None else None
        return server.target if server is not None else None

    def warm(self, connections: int) -> None:
        """Open read connections in advance. RetryableError if no server accepts one."""
        known = self._current_map()
        failed = ""
        for server in known.servers:
            broken = server.fast.warm(connections)
            self._mark(server, is_down=broken is not None)
            failed = broken.reason if broken is not None else failed
        if failed and all(server.down for server in known.servers):
            raise RetryableError(failed)

    def rotate_password(self) -> None:
        """Reconnect if the servers have not accepted the newest password yet, and then renew idle connections."""
        passwords = self._login.passwords
        if passwords.is_rotated() or self._map is None:
            return
        for server in self._map.servers:
            server.slow.close()
            server.slow.warm(1)
        if passwords.is_rotated():
            for server in self._map.servers:
                server.fast.close()

    def close(self) -> None:
        """Close all connections."""
        for server in list(self._known.values()):
            server.close()

    def _route(self, known: _SlotMap, commands: Sequence[Command], *, fast: bool) -> list[Reply]:
        replies: list[Reply] = [ConnectionFailure("index: no server owns that slot")] * len(commands)
        parts: dict[RedisServer, list[int]] = {}
        for at, command in enumerate(commands):
            server = _owner(known, command)
            if server is not None:
                parts.setdefault(server, []).append(at)
        if fast and any(not server.down for server in parts):
            parts = {server: part for server, part in parts.items() if not server.down}
        self._round_trip(parts, commands, replies, fast=fast)
        elsewhere: dict[RedisServer, list[int]] = {}
        asking: set[int] = set()
        for at, reply in enumerate(replies):
            if isinstance(reply, Redirect) and (server := self._follow_redirect(known, reply)) is not None:
                elsewhere.setdefault(server, []).append(at)
                if reply.asking:
                    asking.add(at)
        if elsewhere:
            self._round_trip(elsewhere, commands, replies, fast=fast, asking=asking)
        return [ConnectionFailure("index: redirected twice") if isinstance(r, Redirect) else r for r in replies]

    def _round_trip(
        self,
        parts: dict[RedisServer, list[int]],
        commands: Sequence[Command],
        replies: list[Reply],
        *,
        fast: bool,
        asking: Iterable[int] = (),
    ) -> None:
        first = set(asking)
        work = [
            (
                server.fast if fast else server.slow,
                [c for at in part for c in ([(b"ASKING",), commands[at]] if at in first else [commands[at]])],
            )
            for server, part in parts.items()
        ]
        for (server, part), answer in zip(parts.items(), execute_all(work), strict=True):
            if isinstance(answer, ConnectionFailure):
                self._mark(server, is_down=True)
                for at in part:
                    replies[at] = answer
                continue
            if not fast:
                self._mark(server, is_down=False)
            rest = iter(answer)
            for at in part:
                if at in first:
                    next(rest)
                replies[at] = next(rest)

    def _follow_redirect(self, known: _SlotMap, redirect: Redirect) -> RedisServer | None:
        server = self._server(redirect.target)
        if server is None:
            return None
        if not redirect.asking:
            self._stale = True
            if server in known.servers and 0 <= redirect.slot < len(known.owners):
                known.owners[redirect.slot] = known.servers.index(server)
        return server

    def _groups(self, known: _SlotMap, names: Sequence[bytes]) -> list[tuple[RedisServer, list[bytes]]]:
        if not known.owners:
            return [(known.servers[0], list(names))]
        slots: dict[int, list[bytes]] = {}
        for name in names:
            slots.setdefault(key_slot(name), []).append(name)
        return [(known.servers[known.owners[slot]], group) for slot, group in slots.items() if known.owners[slot] >= 0]

    def _update(self, server: RedisServer, names: Sequence[bytes], edit: Callable[[bytes], bytes]) -> bool:
        """Update under WATCH; False after a concurrent write."""
        with server.slow.open() as exchange:
            replies = exchange.execute([(b"WATCH", *names), (b"MGET", *names)])
            self._check(replies)
            new = {name: edit(value) for name, value in zip(names, replies[1], strict=True) if value is not None}
            old = {name: value for name, value in zip(names, replies[1], strict=True) if value is not None}
            changed = [name for name in new if new[name] != old[name]]
            if not changed:
                self._check(exchange.execute([(b"UNWATCH",)]))
                return True
            writes = [(b"SET", name, new[name]) if new[name] else (b"DEL", name) for name in changed]
            replies = exchange.execute([(b"MULTI",), *writes, (b"EXEC",)])
            if any(isinstance(r, ErrorReply) and r.code == "OOM" for r in replies):
                # no memory even for shorter values: the entries are deleted with the records of other nodes
                replies = exchange.execute([(b"DEL", name) for name in changed])
            self._check(replies)
            return replies[-1] is not None

    def _check(self, replies: Iterable[Reply]) -> None:
        """Raise the error replies."""
        refusals = [r for r in replies if isinstance(r, (ErrorReply, Redirect))]
        for r in refusals:
            code = r.code if isinstance(r, ErrorReply) else "MOVED"
            if code in _MOVING:
                self._stale = True
            if code == "OOM":
                raise IndexFullError("index: OOM, its memory is full", where=self.address)
            hint = ": this is a Redis Cluster, give its URL as redis+cluster://" if code in _CLUSTERED else ""
            raise RetryableError(f"index: {code}{hint}", where=self.address)

    def _mark(self, server: RedisServer, *, is_down: bool) -> None:
        server.down = is_down
        if is_down:
            self._stale = True

    def _current_map(self) -> _SlotMap:
        is_old = self._stale or time.monotonic() - self._discovered_at > _DISCOVERY_INTERVAL_S
        if self._map is None or (is_old and not self.is_fixed):
            return self._discover()
        return self._map

    def _discover(self) -> _SlotMap:
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
                    [server.target for server in (self._map.servers if self._map else ())]
                )
            fresh = self._build_map(owned)
            self._map, self._discovered_at = fresh, time.monotonic()
            with self._lock:
                gone = [self._known.pop(t) for t, s in list(self._known.items()) if s not in fresh.servers]
            for server in gone:
                server.close()
            return fresh

    def _build_map(self, owned: Sequence[tuple[Target, list[range]]]) -> _SlotMap:
        servers = [self._server(target) for target, _ in owned]
        if any(server is None for server in servers):
            raise RetryableError("index: too many servers", where=self.address)
        if self._url.kind != "cluster":
            return _SlotMap(tuple(s for s in servers if s), [], ("",))
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
        return _SlotMap(tuple(s for s in servers if s), owners, tuple(tags[n] for n in range(len(owned))))

    def _server(self, target: Target) -> RedisServer | None:
        with self._lock:
            server = self._known.get(target)
            if server is None and len(self._known) < _MAX_SERVERS:
                server = self._known[target] = RedisServer(target, self._login, *self._times)
            return server


def _owner(known: _SlotMap, command: Command) -> RedisServer | None:
    if not known.owners:
        return known.servers[0]
    name = command[1]
    owner = known.owners[key_slot(name if isinstance(name, bytes) else str(name).encode())]
    return known.servers[owner] if owner >= 0 else None


def _free(info: bytes) -> float:
    """Parse INFO memory: the free part of the server's memory; 1 without a limit."""
    found = dict(line.split(b":", 1) for line in info.split(b"\r\n") if line.count(b":") == 1)
    used, most = found.get(b"used_memory", b""), found.get(b"maxmemory", b"")
    return 1 - int(used) / int(most) if used.isdigit() and most.isdigit() and int(most) else 1.0
