"""The index in Redis or Valkey: what is asked and told; commands of Redis 6.2, no scripts.

====================== ==========================================================================
`b` + key[:16]         packed records (kvpool_sidecar.index.record), one per node that has the block
`n:<number>`           JSON of NodeInfo, expires with the node's lease
`N:<node name>`        the node's number
`nodes`                counter that numbers are taken from
`epoch` + tag          random, one on each server; whoever finds one missing sets it
====================== ==========================================================================

A node appends its record to an entry (APPEND is atomic) and takes it out under WATCH. The epoch that nodes are told
changes when one of the servers was emptied, replaced by its replica or started anew: then everybody announces again.
A lease is extended by commands that need no memory, so that nodes stay alive in an index that is full.
"""

from __future__ import annotations

import hashlib
import secrets
from typing import TYPE_CHECKING

from kvpool import index_url
from kvpool.errors import RetryableError
from kvpool_sidecar.index.base import MAX_MEMBERS, MAX_NODE, Answer, Index, NodeInfo
from kvpool_sidecar.index.link import Broken, Login, Refusal
from kvpool_sidecar.index.record import Record, entry_name, pack, unpack
from kvpool_sidecar.index.servers import Servers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpool_sidecar.index.link import Command, Reply, Target
    from kvpool_sidecar.index.servers import Server

__all__ = ["RedisIndex"]

_NAME_TTL_MS = 30 * 24 * 3600 * 1000
_MAX_TRIES = 64
_MEMBERS_AT_ONCE = 1024
_TIMEOUT_S = 0.5
_SLOW_TIMEOUT_S = 2.0


class RedisIndex(Index):
    """See Index. Connects at the first use, or when warmed. `url`: kvpool.index_url.

    `timeout_s` is how long a connection that says nothing is kept, not how long a lookup may take: a caller in a hurry
    stops waiting by itself, and an answer that is a little late leaves the connection whole.
    """

    def __init__(
        self,
        url: str,
        *,
        username: str = "",
        password: str = "",
        ca: str = "",
        cert: str = "",
        key: str = "",
        lease_s: float = 15.0,
        timeout_s: float = _TIMEOUT_S,
        slow_timeout_s: float = _SLOW_TIMEOUT_S,
    ) -> None:
        parsed = index_url.parse(url)
        login = Login(username or parsed.username, password or parsed.password, parsed.db, parsed.tls, ca, cert, key)
        self._lease_ms = max(1, int(lease_s * 1000))
        self._servers = Servers(parsed, login, timeout_s, slow_timeout_s)
        self._heard: dict[Target, str] = {}  # what tells a server's data apart
        self._untold: set[Target] = set()  # servers that missed announcements
        self._returns = 0

    def join(self, info: NodeInfo) -> int:
        name = f"N:{info.node}"
        (known,) = self._servers.run([(b"GET", name)])
        number = int(known) if known is not None and known.isdigit() else 0
        for _ in range(_MAX_TRIES):
            if not 0 < number <= MAX_NODE:
                (count,) = self._servers.run([(b"INCRBY", b"nodes", 1)])
                number = int(count) % MAX_NODE + 1
            if self._take(number, info):
                if known != b"%d" % number:
                    self._servers.run([(b"SET", name, number, b"PX", _NAME_TTL_MS)])
                return number
            number = 0
        raise RetryableError("no free node number", where=self._servers.where)

    def _take(self, number: int, info: NodeInfo) -> bool:
        """Hold the lease of `number`, unless another node does."""
        lease, text = b"n:%d" % number, info.dumps()
        if self._servers.run([(b"SET", lease, text, b"NX", b"PX", self._lease_ms)])[0] is not None:
            return True
        (value,) = self._servers.run([(b"GET", lease)])
        holder = NodeInfo.loads(value or b"")
        if holder is not None and holder.node != info.node:
            return False
        self._servers.run([(b"SET", lease, text, b"PX", self._lease_ms)])
        return True

    def renew(self, number: int, info: NodeInfo) -> str | None:
        lease, name = b"n:%d" % number, f"N:{info.node}"
        value, known = self._servers.run([(b"GET", lease), (b"GET", name)])
        if value != info.dumps().encode():
            if not self._take(number, info):
                return None
        elif not self._servers.run([(b"PEXPIRE", lease, self._lease_ms)])[0]:
            raise RetryableError("the lease ended just now", where=self._servers.where)
        if known == b"%d" % number:
            self._servers.run([(b"PEXPIRE", name, _NAME_TTL_MS)])
        else:
            self._servers.run([(b"SET", name, number, b"PX", _NAME_TTL_MS)])
        return self._epoch()

    def _epoch(self) -> str:
        """Of all servers; one that is away counts as it was, until it is back."""
        servers = self._servers.servers()
        names = [f"epoch{tag}" for _, tag in servers]
        values = self._servers.run([(b"GET", name) for name in names], partly=True)
        missing = [name for name, value in zip(names, values, strict=True) if value is None]
        if missing:
            self._servers.run([(b"SET", name, secrets.token_hex(8), b"NX") for name in missing])
            values = self._servers.run([(b"GET", name) for name in names], partly=True)
        if None in values:
            raise RetryableError("the index was emptied just now", where=self._servers.where)
        for (server, _), value in zip(servers, values, strict=True):
            self._hear(server, value)
        texts = sorted(self._heard.get(server.target, "away") for server, _ in servers)
        return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]

    def _hear(self, server: Server, epoch: Reply) -> None:
        """Note what tells apart the data that this server has now from any that it had or will have."""
        life = self._life(server) if isinstance(epoch, bytes) else None
        if life is None:
            return
        if server.target in self._untold:  # back again: what it was not told meanwhile is told now
            self._untold.discard(server.target)
            self._returns += 1
            self._heard.pop(server.target, None)
        before, _, times = self._heard.get(server.target, "").rpartition("~")
        now = epoch.decode("ascii", "replace") + life
        self._heard[server.target] = f"{now}~{times if now == before else self._returns}"

    def _life(self, server: Server) -> str | None:
        """What changes with the process behind an address, where we may ask. None: it does not answer."""
        if not server.may_info:
            return server.slow.name
        answer = server.slow.ask([(b"INFO", b"server")])
        if isinstance(answer, Broken):
            return None
        if isinstance(answer[0], Refusal):
            server.may_info = False
            return server.slow.name
        line = next((line for line in bytes(answer[0]).split(b"\r\n") if line.startswith(b"run_id:")), b"")
        return server.slow.name + line.decode("ascii", "replace")

    def leave(self, number: int, info: NodeInfo) -> None:
        (value,) = self._servers.run([(b"GET", b"n:%d" % number)])
        holder = NodeInfo.loads(value or b"")
        if holder is not None and holder.node == info.node:
            self._servers.run([(b"DEL", b"n:%d" % number)])

    def announce(self, blocks: Sequence[tuple[bytes, Record]]) -> None:
        if not blocks:
            return
        wanted = {entry_name(key): record for key, record in blocks}
        values = self._servers.run([(b"GET", name) for name in wanted], partly=True)
        append: dict[bytes, Command] = {}
        stale: dict[int, list[bytes]] = {}
        for (name, record), value in zip(wanted.items(), values, strict=True):
            if isinstance(value, Broken):
                self._leave_untold(name)
                continue
            own = [r for r in unpack(value) if r.node == record.node]
            if own == [record]:
                continue
            if own:
                stale.setdefault(record.node, []).append(name)
            append[name] = (b"APPEND", name, pack(record))
        for node, names in stale.items():
            self._take_out(node, names)
        if append:
            for name, reply in zip(append, self._servers.run(list(append.values()), partly=True), strict=True):
                if isinstance(reply, Broken):
                    self._leave_untold(name)

    def _leave_untold(self, name: bytes) -> None:
        """The server that this entry belongs to is away. When it is back, the epoch changes and all is told again."""
        target = self._servers.target_of(name)
        if target is not None:
            self._untold.add(target)

    def withdraw(self, number: int, keys: Sequence[bytes]) -> None:
        if keys:
            self._take_out(number, [entry_name(key) for key in dict.fromkeys(keys)])

    def _take_out(self, number: int, names: Sequence[bytes]) -> None:
        """What a server that is away is not told, a reader finds out by itself."""

        def without(value: bytes) -> bytes:
            records = unpack(value)
            left = [r for r in records if r.node != number]
            return b"".join(pack(r) for r in left) if len(left) < len(records) else value

        self._servers.change(names, without)

    def ask(self, keys: Sequence[bytes], numbers: Sequence[int]) -> Answer:
        names = [entry_name(key) for key in keys] + [b"n:%d" % number for number in numbers]
        if not names:
            return Answer([], {})
        values = self._servers.read(names)
        records = [unpack(value) if isinstance(value, bytes) else [] for value in values[: len(keys)]]
        nodes, untold = {}, set()
        for number, value in zip(numbers, values[len(keys) :], strict=True):
            if isinstance(value, Broken):
                untold.add(number)
            elif value is not None and (info := NodeInfo.loads(value)) is not None:
                nodes[number] = info
        return Answer(records, nodes, frozenset(untold))

    def members(self) -> list[NodeInfo]:
        """See Index. Numbers are taken one after the other, so the counter bounds them."""
        (count,) = self._servers.run([(b"GET", b"nodes")])
        last = int(count or 0)
        numbers = range(1, MAX_NODE + 1) if last >= MAX_NODE else range(1, last + 2)
        found: list[NodeInfo] = []
        for at in range(0, len(numbers), _MEMBERS_AT_ONCE):
            found += self.nodes(numbers[at : at + _MEMBERS_AT_ONCE]).values()
            if len(found) >= MAX_MEMBERS:
                break
        return found[:MAX_MEMBERS]

    def warm(self, connections: int) -> None:
        self._servers.warm(connections)

    def close(self) -> None:
        self._servers.close()
