"""The servers of one index: a single Redis, the master that Sentinel reports, or the masters of a Cluster.

Reads (fast connections) never run discovery, except the first one: the part of an unavailable server is missing in the
result. All other commands (slow connections: heartbeats, announcements) discover the current servers. In a Cluster,
commands are grouped by slot and sent to all masters at the same time.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvpool.errors import RetryableError
from kvpool_sidecar.index.base import IndexFullError
from kvpool_sidecar.index.redis_connection import ConnectionFailure, ErrorReply, Redirect, execute_all
from kvpool_sidecar.index.redis_slots import HEADROOM, ServerMap, ServerMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from kvpool.protocol.index_url import IndexUrl
    from kvpool_sidecar.index.redis_connection import Command, Login, Reply, Target
    from kvpool_sidecar.index.redis_slots import RedisServer, SlotMap

__all__ = ["RedisTopology"]

_MOVING = {"READONLY", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "MOVED"}
_CLUSTERED = {"MOVED", "CROSSSLOT"}


class RedisTopology:
    """Thread-safe. RetryableError for temporary failures, IndexFullError if a server has no memory left."""

    def __init__(self, url: IndexUrl, login: Login, fast_s: float, slow_s: float) -> None:
        self._login = login
        self._map = ServerMap(url, login, fast_s, slow_s)

    @property
    def address(self) -> str:
        return self._map.address

    @property
    def is_fixed(self) -> bool:
        """True for one server whose address never changes."""
        return self._map.is_fixed

    def read(self, names: Sequence[bytes]) -> list[bytes | ConnectionFailure | None]:
        """Read values; ConnectionFailure for those of an unavailable server. RetryableError if all are unavailable."""
        known = self._map.latest or self._map.discover()
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
        replies = self._route(self._map.current(), commands, fast=False)
        broken = [r for r in replies if isinstance(r, ConnectionFailure)]
        if broken and (not partly or len(broken) == len(replies)):
            raise RetryableError(broken[0].reason)
        self._check(replies)
        return replies

    def update(self, names: Sequence[bytes], edit: Callable[[bytes], bytes]) -> list[RedisServer]:
        """Replace values by `edit(value)`; b"" deletes the key. Best effort against concurrent writers.

        Returns the unavailable servers; RetryableError if all are.
        """
        groups = self._map.current().groups(names)
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

    def require_memory(self, names: Collection[bytes]) -> None:
        """Raise IndexFullError if a server of these keys is nearly full: the rest is reserved for leases.

        A server is asked again when its free memory may have changed much, else every 10 s.
        """
        known = self._map.current()
        servers = {known.owner(name) for name in names} if known.owners else {known.servers[0]}
        now = time.monotonic()
        asked = [s for s in servers if s is not None and s.allows_info and s.memory.is_due(len(names), now)]
        for server, answer in zip(asked, execute_all([(s.slow, [(b"INFO", b"memory")]) for s in asked]), strict=True):
            if isinstance(answer, ConnectionFailure):
                continue
            server.allows_info = not isinstance(answer[0], ErrorReply)
            server.memory = _memory(answer[0], now) if server.allows_info else ServerMemory()
        if any(s is not None and s.memory.free < HEADROOM for s in servers):
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
        known = self._map.current()
        return list(zip(known.servers, known.tags, strict=True))

    def target_of(self, name: bytes) -> Target | None:
        """Return the server of a key, if it is known."""
        known = self._map.latest
        server = known.owner(name) if known is not None else None
        return server.target if server is not None else None

    def warm(self, connections: int) -> None:
        """Open read connections in advance. RetryableError if no server accepts one."""
        known = self._map.current()
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
        known = self._map.latest
        if passwords.is_rotated() or known is None:
            return
        for server in known.servers:
            server.slow.close()
            server.slow.warm(1)
        if passwords.is_rotated():
            for server in known.servers:
                server.fast.close()

    def close(self) -> None:
        """Close all connections."""
        self._map.close()

    def _route(self, known: SlotMap, commands: Sequence[Command], *, fast: bool) -> list[Reply]:
        replies: list[Reply] = [ConnectionFailure("index: no server owns that slot")] * len(commands)
        parts: dict[RedisServer, list[int]] = {}
        for at, command in enumerate(commands):
            server = known.owner(command[1])
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

    def _follow_redirect(self, known: SlotMap, redirect: Redirect) -> RedisServer | None:
        server = self._map.server(redirect.target)
        if server is None:
            return None
        if not redirect.asking:
            self._map.mark_stale()
            if server in known.servers and 0 <= redirect.slot < len(known.owners):
                known.owners[redirect.slot] = known.servers.index(server)
        return server

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
                self._map.mark_stale()
            if code == "OOM":
                raise IndexFullError("index: OOM, its memory is full", where=self.address)
            hint = ": this is a Redis Cluster, give its URL as redis+cluster://" if code in _CLUSTERED else ""
            raise RetryableError(f"index: {code}{hint}", where=self.address)

    def _mark(self, server: RedisServer, *, is_down: bool) -> None:
        server.down = is_down
        if is_down:
            self._map.mark_stale()


def _memory(info: bytes, now: float) -> ServerMemory:
    """Parse INFO memory."""
    found = dict(line.split(b":", 1) for line in info.split(b"\r\n") if line.count(b":") == 1)
    used, most = found.get(b"used_memory", b""), found.get(b"maxmemory", b"")
    if not (used.isdigit() and most.isdigit() and int(most)):
        return ServerMemory(asked_at=now)
    return ServerMemory(1 - int(used) / int(most), int(most), now)
