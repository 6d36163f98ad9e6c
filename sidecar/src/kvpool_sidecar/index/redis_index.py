"""The index in Redis or Valkey: data model and commands (Redis 6.2, no scripts).

====================== ==========================================================================
`b` + key[:16]         packed records (kvpool_sidecar.index.record), one per node that has the block
`n:<number>`           JSON of NodeInfo, expires with the node's lease
`n:` + word            changes of the roster (kvpool_sidecar.index.redis_roster)
`N:<node name>`        the node's number
`nodes`                counter from which numbers are taken
`epoch` + tag          random, one on each server; a node that finds it missing sets it
`s:<number>`           heartbeat; expires when the node's entries may be removed
`s:sweeper` + tag      lease of the node that expires entries on this server
`s:swept` + tag        expires when the next expiry is due
====================== ==========================================================================

A node appends its record to an entry (APPEND is atomic) and removes it under WATCH; an entry with MAX_RECORDS holders
takes no more. The epoch that nodes read changes
when one of the servers was emptied, replaced by its replica or restarted: then all nodes announce their blocks again.
A lease is extended by commands that need no memory, so that nodes stay alive in a full index.
"""

from __future__ import annotations

import functools
import hashlib
import secrets
from typing import TYPE_CHECKING

from kvpool.errors import RetryableError
from kvpool.protocol import index_url
from kvpool_sidecar.index.base import MAX_NODE, Index, IndexAnswer, NodeInfo, RosterChange
from kvpool_sidecar.index.credentials import IndexCredentials, Passwords
from kvpool_sidecar.index.record import (
    MAX_RECORDS,
    Record,
    entry_name,
    is_entry_name,
    pack,
    unpack,
    unpack_all,
    with_room,
    without,
)
from kvpool_sidecar.index.redis_connection import ConnectionFailure, Login
from kvpool_sidecar.index.redis_roster import RedisRoster, lease_name
from kvpool_sidecar.index.redis_topology import RedisTopology

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from kvpool_sidecar.index.redis_connection import Command, Reply, Target
    from kvpool_sidecar.index.redis_slots import RedisServer

__all__ = ["RedisIndex"]

_NAME_TTL_MS = 30 * 24 * 3600 * 1000
_MAX_TRIES = 64
_SWEEPER_MS = 30_000
_SWEEP_BATCH = 512
_TIMEOUT_S = 0.5
_SLOW_TIMEOUT_S = 2.0


class RedisIndex(Index):
    """See Index. Connects at the first use, or when warmed. `url`: kvpool.protocol.index_url.

    `timeout_s` limits the silence of a connection, not a lookup: a caller with a shorter deadline stops waiting itself,
    and a response that is slightly late leaves the connection intact.
    """

    def __init__(
        self,
        url: str,
        *,
        credentials: IndexCredentials | None = None,
        lease_s: float = 15.0,
        forget_s: float = 3600.0,
        timeout_s: float = _TIMEOUT_S,
        slow_timeout_s: float = _SLOW_TIMEOUT_S,
    ) -> None:
        parsed = index_url.parse(url)
        c = credentials or IndexCredentials()
        passwords = c.passwords or Passwords.fixed(parsed.password)
        login = Login(c.username or parsed.username, passwords, parsed.db, parsed.tls, c.ca, c.cert, c.key)
        self._lease_ms = max(1, int(lease_s * 1000))
        self._forget_ms = max(1, int(forget_s * 1000))
        self._topology = RedisTopology(parsed, login, timeout_s, slow_timeout_s)
        self._roster = RedisRoster(self._topology, lease_s)
        self._epochs: dict[Target, str] = {}  # identifies the data set of a server
        self._missed: set[Target] = set()  # servers that missed announcements
        self._returns = 0
        self._latest_epoch = ""

    def join(self, info: NodeInfo) -> int:
        name = f"N:{info.node}"
        (known,) = self._topology.execute([(b"GET", name)])
        number = int(known) if known is not None and known.isdigit() else 0
        for _ in range(_MAX_TRIES):
            if not 0 < number <= MAX_NODE:
                (count,) = self._topology.execute([(b"INCRBY", b"nodes", 1)])
                number = int(count) % MAX_NODE + 1
            if self._claim(number, info):
                if known != b"%d" % number:
                    self._topology.execute([(b"SET", name, number, b"PX", _NAME_TTL_MS)])
                self._topology.execute([(b"SET", b"s:%d" % number, b"", b"PX", self._forget_ms)])
                return number
            number = 0
        raise RetryableError("no free node number", where=self._topology.address)

    def _claim(self, number: int, info: NodeInfo) -> bool:
        """Hold the lease of `number`, unless another node does."""
        lease, text = lease_name(number), info.dumps()
        if self._topology.execute([(b"SET", lease, text, b"NX", b"PX", self._lease_ms)])[0] is None:
            (value,) = self._topology.execute([(b"GET", lease)])
            holder = NodeInfo.loads(value or b"")
            if holder is not None and holder.node != info.node:
                return False
            self._topology.execute([(b"SET", lease, text, b"PX", self._lease_ms)])
            if holder == info:
                return True
        self._roster.publish([number])
        return True

    def renew(self, number: int, info: NodeInfo) -> str | None:
        self._topology.rotate_password()
        lease, name, seen = lease_name(number), f"N:{info.node}", b"s:%d" % number
        commands: list[Command] = [
            (b"GET", lease),
            (b"GET", name),
            (b"GET", b"nodes"),
            (b"PEXPIRE", lease, self._lease_ms),  # of another node: it lasts a little longer
            (b"PEXPIRE", name, _NAME_TTL_MS),
            (b"PEXPIRE", seen, self._forget_ms),
        ]
        servers = self._topology.servers()
        others = [(b"GET", f"epoch{tag}") for _, tag in servers] + [(b"GET", key) for key in self._roster.names()]
        replies = self._topology.execute([*commands, *others], partly=True)
        broken = next((r for r in replies[: len(commands)] if isinstance(r, ConnectionFailure)), None)
        if broken is not None:
            raise RetryableError(broken.reason)
        value, known, count, is_extended, _, is_seen = replies[: len(commands)]
        epochs = replies[len(commands) : len(commands) + len(servers)]
        self._roster.note(replies[len(commands) + len(servers) :])
        behind = number - 1 - (int(count) if count is not None and count.isdigit() else 0)
        if behind > 0:  # the index was emptied: the counter must cover this number again
            self._topology.execute([(b"INCRBY", b"nodes", behind)])
        if value is None:
            self._roster.disturb()
        if value != info.dumps().encode():
            if not self._claim(number, info):
                return None
        elif not is_extended:
            raise RetryableError("the lease ended just now", where=self._topology.address)
        if known != b"%d" % number:
            self._topology.execute([(b"SET", name, number, b"PX", _NAME_TTL_MS)])
        if not is_seen:
            self._topology.execute([(b"SET", seen, b"", b"PX", self._forget_ms)])
        epoch = self._epoch(servers, epochs)
        if epoch != self._latest_epoch:
            self._latest_epoch = epoch
            self._roster.disturb()
        return epoch

    def _epoch(self, servers: Sequence[tuple[RedisServer, str]], values: Sequence[Reply]) -> str:
        """Of all servers; one that is away counts as it was, until it is back."""
        names = [f"epoch{tag}" for _, tag in servers]
        missing = [name for name, value in zip(names, values, strict=True) if value is None]
        if missing:
            self._topology.execute([(b"SET", name, secrets.token_hex(8), b"NX") for name in missing])
            values = self._topology.execute([(b"GET", name) for name in names], partly=True)
        if None in values:
            raise RetryableError("the index was emptied just now", where=self._topology.address)
        for (server, _), value in zip(servers, values, strict=True):
            self._note_epoch(server, value)
        texts = sorted(self._epochs.get(server.target, "away") for server, _ in servers)
        return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]

    def _note_epoch(self, server: RedisServer, epoch: Reply) -> None:
        """Record what distinguishes the server's current data set from its past and future ones."""
        life = server.process() if isinstance(epoch, bytes) else None
        if life is None:
            return
        if server.target in self._missed:  # available again: the missed announcements are due
            self._missed.discard(server.target)
            self._returns += 1
            self._epochs.pop(server.target, None)
        before, _, times = self._epochs.get(server.target, "").rpartition("~")
        now = epoch.decode("ascii", "replace") + life
        self._epochs[server.target] = f"{now}~{times if now == before else self._returns}"

    def leave(self, number: int, info: NodeInfo) -> None:
        (value,) = self._topology.execute([(b"GET", lease_name(number))])
        holder = NodeInfo.loads(value or b"")
        if holder is not None and holder.node == info.node:
            self._topology.execute([(b"DEL", lease_name(number))])
            self._roster.publish([number])

    def announce(self, blocks: Sequence[tuple[bytes, Record]]) -> None:
        if not blocks:
            return
        wanted = {entry_name(key): record for key, record in blocks}
        values = self._topology.execute([(b"GET", name) for name in wanted], partly=True)
        append: dict[bytes, Command] = {}
        crowded: dict[int, list[bytes]] = {}
        for (name, record), value in zip(wanted.items(), values, strict=True):
            if isinstance(value, ConnectionFailure):
                self._note_missed(name)
                continue
            records = unpack_all(value or b"")
            own = [r for r in records if r.node == record.node]
            if len(records) <= MAX_RECORDS and (own == [record] or (not own and len(records) == MAX_RECORDS)):
                continue  # known, or enough nodes have it
            if own or len(records) > MAX_RECORDS:
                crowded.setdefault(record.node, []).append(name)
            append[name] = (b"APPEND", name, pack(record))
        for node, names in crowded.items():
            self._topology.update(names, functools.partial(with_room, node))
        if append:
            self._topology.require_memory(append)
            for name, reply in zip(append, self._topology.execute(list(append.values()), partly=True), strict=True):
                if isinstance(reply, ConnectionFailure):
                    self._note_missed(name)

    def _note_missed(self, name: bytes) -> None:
        """Record a missed announcement. When the server is back, the epoch changes and all is announced again."""
        target = self._topology.target_of(name)
        if target is not None:
            self._missed.add(target)

    def withdraw(self, number: int, keys: Sequence[bytes]) -> None:
        if keys:
            self._remove_records(number, [entry_name(key) for key in dict.fromkeys(keys)])

    def _remove_records(self, number: int, names: Sequence[bytes]) -> None:
        """Remove records; entries on an unavailable server become stale, which readers detect."""
        self._topology.update(names, functools.partial(without, {number}))

    def query(self, keys: Sequence[bytes], numbers: Sequence[int]) -> IndexAnswer:
        names = [entry_name(key) for key in keys] + [lease_name(number) for number in numbers]
        if not names:
            return IndexAnswer([], {})
        values = self._topology.read(names)
        records = [() if isinstance(value, ConnectionFailure) else unpack(value) for value in values[: len(keys)]]
        nodes, unknown = {}, set()
        for number, value in zip(numbers, values[len(keys) :], strict=True):
            if isinstance(value, ConnectionFailure):
                unknown.add(number)
            elif value is not None and (info := NodeInfo.loads(value)) is not None:
                nodes[number] = info
        return IndexAnswer(records, nodes, frozenset(unknown))

    def live_nodes(self) -> IndexAnswer:
        found = self._roster.everyone()
        return IndexAnswer([], {n: info for n, info in found.items() if info is not None})

    def refresh_roster(self) -> RosterChange:
        return self._roster.refresh()

    def expire(self, number: int, pace: Callable[[int], bool]) -> int:
        removed = 0
        for server, tag in self._topology.servers():
            lease, done = f"s:sweeper{tag}", f"s:swept{tag}"
            if self._topology.execute([(b"GET", done)])[0] is not None:
                continue
            if self._topology.execute([(b"SET", lease, number, b"NX", b"PX", _SWEEPER_MS)])[0] is None:
                continue
            count, is_whole = self._expire_server(server, lease, number, pace)
            removed += count
            if is_whole:
                self._topology.execute([(b"SET", done, b"", b"PX", self._forget_ms)])
            self._topology.execute([(b"DEL", lease)])
        return removed

    def _expire_server(
        self, server: RedisServer, lease: str, number: int, pace: Callable[[int], bool]
    ) -> tuple[int, bool]:
        removed, cursor = 0, b"0"
        while True:
            cursor, names = self._topology.scan(server, cursor, _SWEEP_BATCH)
            entries = [name for name in names if is_entry_name(name)]
            values = self._topology.execute([(b"GET", name) for name in entries]) if entries else []
            found = [unpack_all(value or b"") for value in values]
            numbers = {r.node for records in found for r in records}
            gone = self._expired_nodes(numbers)
            if gone:
                hit = [n for n, records in zip(entries, found, strict=True) if any(r.node in gone for r in records)]
                removed += sum(r.node in gone for records in found for r in records)
                self._topology.update(hit, functools.partial(without, gone))
            holder, _ = self._topology.execute([(b"GET", lease), (b"PEXPIRE", lease, _SWEEPER_MS)])
            if holder != b"%d" % number or not pace(len(names)):
                return removed, False
            if cursor == b"0":
                return removed, True

    def _expired_nodes(self, numbers: Collection[int]) -> set[int]:
        """Return the nodes without a lease and without a heartbeat."""
        asked = list(numbers)
        if not asked:
            return set()
        replies = self._topology.execute([(b"GET", name % n) for n in asked for name in (b"n:%d", b"s:%d")])
        return {n for at, n in enumerate(asked) if replies[2 * at] is None and replies[2 * at + 1] is None}

    def warm(self, connections: int) -> None:
        self._topology.warm(connections)

    def close(self) -> None:
        self._topology.close()
