"""The index in Redis. The only module that knows Redis; commands of Redis 6.2, no scripts.

====================== ==========================================================================
`b` + key[:16]         packed records (kvpool_sidecar.index.record), one per node that has the block
`n:<number>`           JSON of NodeInfo, expires with the node's lease
`N:<node name>`        the node's number
`nodes`                counter that numbers are taken from
`epoch`                random; whoever finds it missing sets it, everybody who sees a new one announces again
====================== ==========================================================================

A node appends its record to an entry (APPEND is atomic) and takes it out under WATCH. After a timeout a connection is
thrown away, so an answer can never be taken for that of another question (CVE-2023-28858).
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any, TypeVar

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from kvpool.errors import ConfigError, RetryableError
from kvpool_sidecar.index.base import MAX_NODE, Answer, Index, NodeInfo
from kvpool_sidecar.index.record import Record, entry_name, pack, unpack

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["RedisIndex", "flush"]

_T = TypeVar("_T")
_NAME_TTL_S = 30 * 24 * 3600
_MAX_TRIES = 64
_TIMEOUT_S = 0.5
_SLOW_TIMEOUT_S = 2.0


class RedisIndex(Index):
    """See Index. Connects at the first use, or when warmed.

    `timeout_s` is how long a connection that says nothing is kept, not how long a lookup may take: a caller in a hurry
    stops waiting by itself, and an answer that is a little late leaves the connection whole.
    """

    def __init__(
        self,
        url: str,
        *,
        username: str = "",
        password: str = "",
        lease_s: float = 15.0,
        timeout_s: float = _TIMEOUT_S,
        slow_timeout_s: float = _SLOW_TIMEOUT_S,
    ) -> None:
        self._where = url.rpartition("@")[2]
        self._lease_ms = max(1, int(lease_s * 1000))
        self._fast = self._client(url, username, password, timeout_s)
        self._slow = self._client(url, username, password, slow_timeout_s)

    def _client(self, url: str, username: str, password: str, timeout_s: float) -> redis.Redis:
        credentials: dict[str, Any] = {"username": username or None, "password": password} if password else {}
        try:
            return redis.Redis.from_url(
                url,
                socket_timeout=timeout_s,
                socket_connect_timeout=_SLOW_TIMEOUT_S,
                retry=Retry(NoBackoff(), 0),
                retry_on_timeout=False,
                protocol=2,
                driver_info=None,
                **credentials,
            )
        except ValueError as e:
            raise ConfigError(f"index.url: {e}") from None

    def join(self, info: NodeInfo) -> int:
        name = f"N:{info.node}"
        return self._do(lambda: self._join(name, info))

    def _join(self, name: str, info: NodeInfo) -> int:
        known = self._slow.get(name)
        number = int(known) if known is not None and known.isdigit() else 0
        for _ in range(_MAX_TRIES):
            if not 0 < number <= MAX_NODE:
                number = int(self._slow.incr("nodes")) % MAX_NODE + 1
            if self._take(number, info):
                self._slow.set(name, number, ex=_NAME_TTL_S)
                return number
            number = 0
        raise RetryableError("no free node number", where=self._where)

    def _take(self, number: int, info: NodeInfo) -> bool:
        """Hold the lease of `number`, unless another node does."""
        lease = f"n:{number}"
        if self._slow.set(lease, info.dumps(), nx=True, px=self._lease_ms):
            return True
        holder = NodeInfo.loads(self._slow.get(lease) or b"")
        if holder is not None and holder.node != info.node:
            return False
        self._slow.set(lease, info.dumps(), px=self._lease_ms)
        return True

    def renew(self, number: int, info: NodeInfo) -> str | None:
        return self._do(lambda: self._renew(number, info))

    def _renew(self, number: int, info: NodeInfo) -> str | None:
        if not self._take(number, info):
            return None
        self._slow.set(f"N:{info.node}", number, ex=_NAME_TTL_S)
        self._slow.set("epoch", secrets.token_hex(8), nx=True)
        epoch = self._slow.get("epoch")
        if epoch is None:
            raise RetryableError("the index was emptied just now", where=self._where)
        return _bytes(epoch).decode("ascii", "replace")

    def leave(self, number: int, info: NodeInfo) -> None:
        def work() -> None:
            holder = NodeInfo.loads(self._slow.get(f"n:{number}") or b"")
            if holder is not None and holder.node == info.node:
                self._slow.delete(f"n:{number}")

        self._do(work)

    def announce(self, blocks: Sequence[tuple[bytes, Record]]) -> None:
        if blocks:
            self._do(lambda: self._announce(dict(blocks)))

    def _announce(self, blocks: dict[bytes, Record]) -> None:
        values = self._slow.mget([entry_name(key) for key in blocks])
        append = self._slow.pipeline(transaction=False)
        stale: list[bytes] = []
        for (key, record), value in zip(blocks.items(), values, strict=True):
            own = [r for r in unpack(_bytes(value)) if r.node == record.node]
            if own == [record]:
                continue
            if own:
                stale.append(key)
            append.append(entry_name(key), pack(record))
        for node in {blocks[key].node for key in stale}:
            self._withdraw(node, [key for key in stale if blocks[key].node == node])
        append.execute()

    def withdraw(self, number: int, keys: Sequence[bytes]) -> None:
        if keys:
            self._do(lambda: self._withdraw(number, keys))

    def _withdraw(self, number: int, keys: Sequence[bytes]) -> None:
        names = [entry_name(key) for key in dict.fromkeys(keys)]
        try:
            self._take_out(number, names)
        except redis.WatchError:
            for name in names:  # somebody wrote one of them meanwhile: one by one, once
                try:
                    self._take_out(number, [name])
                except redis.WatchError:
                    continue

    def _take_out(self, number: int, names: Sequence[bytes]) -> None:
        with self._slow.pipeline(transaction=True) as pipe:
            pipe.watch(*names)  # type: ignore[no-untyped-call]
            values: list[bytes | None] = pipe.mget(names)  # type: ignore[assignment]
            pipe.multi()
            changes = 0
            for name, value in zip(names, values, strict=True):
                records = unpack(value)
                left = [r for r in records if r.node != number]
                if len(left) == len(records):
                    continue
                changes += 1
                if left:
                    pipe.set(name, b"".join(pack(r) for r in left))
                else:
                    pipe.delete(name)
            if changes:
                pipe.execute()

    def ask(self, keys: Sequence[bytes], numbers: Sequence[int]) -> Answer:
        names = [entry_name(key) for key in keys] + [b"n:%d" % number for number in numbers]
        if not names:
            return Answer([], {})
        values = self._do(lambda: self._fast.mget(names))
        records = [unpack(_bytes(value)) for value in values[: len(keys)]]
        leases = {n: NodeInfo.loads(v) for n, v in zip(numbers, values[len(keys) :], strict=True) if v is not None}
        return Answer(records, {number: info for number, info in leases.items() if info is not None})

    def warm(self, connections: int) -> None:
        self._do(lambda: self._warm(connections))

    def _warm(self, connections: int) -> None:
        pool = self._fast.connection_pool
        held = []
        try:
            for _ in range(connections):
                held.append(pool.get_connection())  # noqa: PERF401 - those made before a failure are given back
        finally:
            for connection in held:
                pool.release(connection)

    def close(self) -> None:
        self._fast.close()
        self._slow.close()

    def _do(self, work: Callable[[], _T]) -> _T:
        try:
            return work()
        except redis.RedisError as e:
            raise RetryableError(f"index: {type(e).__name__}", where=self._where) from None


def _bytes(value: bytes | str | None) -> bytes:
    return value if isinstance(value, bytes) else (value or "").encode()


def flush(unix_socket: str, username: str, password: str) -> None:
    """Empty the Redis behind `unix_socket`. RetryableError if it does not answer."""
    client = redis.Redis(unix_socket_path=unix_socket, username=username, password=password, protocol=2)
    try:
        client.flushall()
    except redis.RedisError as e:
        raise RetryableError(f"index: {type(e).__name__}: {e}", where=unix_socket) from None
    finally:
        client.close()
