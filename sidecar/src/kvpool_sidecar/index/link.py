"""Connections to one Redis or Valkey server. The only module that knows the library `redis`; protocol RESP2.

A connection that broke off in the middle of an exchange, for whatever reason, is closed and never used again, so an
answer can never be taken for that of another question (CVE-2023-28858).
"""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING, Any, NamedTuple, Self, cast

import hiredis
import redis
from redis.backoff import NoBackoff
from redis.connection import Connection, ConnectionPool, SSLConnection, UnixDomainSocketConnection
from redis.retry import Retry

from kvpool.errors import RetryableError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Broken", "Command", "Link", "Login", "Redirect", "Refusal", "Reply", "Target", "exchange", "flush"]

Command = tuple[bytes | str | int, ...]
Reply = Any
"""bytes, int, None, a list of replies, or a Refusal."""
Target = tuple[str, int]
"""Host and port; port 0: `host` is the path of a unix socket."""
_CONNECT_S = 2.0
_pack = cast("Callable[[Command], bytes]", hiredis.pack_command)  # its stub knows commands of one word only


class Login(NamedTuple):
    """How to get in. `ca`, `cert` and `key` are paths, read anew for each connection, so that they may be rotated."""

    username: str = ""
    password: str = ""
    db: int = 0
    tls: bool = False
    ca: str = ""
    cert: str = ""
    key: str = ""

    def __repr__(self) -> str:
        return f"Login({self.username!r}, tls={self.tls})"


class Refusal(NamedTuple):
    """An error that the server answered: its code, such as OOM, READONLY, NOPERM or ERR."""

    code: str


class Redirect(NamedTuple):
    """The server sends us elsewhere; `asking`: for this once."""

    slot: int
    target: Target
    asking: bool


class Broken(NamedTuple):
    """No answers: what went wrong on the way."""

    reason: str


class Link:
    """A pool of connections to one server. Thread-safe. Connects when it must, or when warmed."""

    def __init__(self, target: Target, login: Login, timeout_s: float) -> None:
        self.target = target
        options: dict[str, Any] = {
            "db": login.db,
            "socket_timeout": timeout_s,
            "retry": Retry(NoBackoff(), 0),
            "protocol": 2,
            "driver_info": None,
        }
        if login.password:
            options |= {"username": login.username or None, "password": login.password}
        kind: type[Any]
        if target[1] == 0:
            kind = UnixDomainSocketConnection
            options["path"] = target[0]
        else:
            kind = SSLConnection if login.tls else Connection
            options |= {"host": target[0], "port": target[1], "socket_connect_timeout": _CONNECT_S}
            options |= {"socket_keepalive": True}
        if login.tls:
            options |= {
                "ssl_ca_certs": login.ca or None,
                "ssl_certfile": login.cert or None,
                "ssl_keyfile": login.key or None,
                "ssl_min_version": ssl.TLSVersion.TLSv1_2,
            }
        self._pool = ConnectionPool(connection_class=kind, **options)

    @property
    def name(self) -> str:
        host, port = self.target
        return f"{host}:{port}" if port else host

    def open(self) -> Talk:
        """One connection for several exchanges; for `with`. Broken as an exception: RetryableError."""
        return Talk(self._pool, self.name)

    def ask(self, commands: Sequence[Command]) -> list[Reply] | Broken:
        """One round trip."""
        return exchange([(self, commands)])[0]

    def warm(self, connections: int) -> Broken | None:
        """Have so many connections ready."""
        held: list[Talk] = []
        try:
            for _ in range(connections):
                held.append(self.open())  # noqa: PERF401 - those made before a failure are given back
        except RetryableError as e:
            return Broken(str(e))
        finally:
            for talk in held:
                talk.close()
        return None

    def close(self) -> None:
        """Let go of the connections that nobody is using."""
        self._pool.disconnect(inuse_connections=False)


class Talk:
    """One borrowed connection. Given back whole, or closed. Not thread-safe."""

    def __init__(self, pool: ConnectionPool, name: str) -> None:
        self._pool = pool
        self._name = name
        self._waiting = 0
        self._connection: Any = self._try(pool.get_connection)

    def send(self, commands: Sequence[Command]) -> None:
        """RetryableError if the connection broke."""
        self._waiting += len(commands)
        packed = [b"".join(map(_pack, commands))]
        self._try(lambda: self._connection.send_packed_command(packed, check_health=False))

    def receive(self) -> list[Reply]:
        """All answers that are due, in order. RetryableError if the connection broke."""
        replies = []
        while self._waiting:
            replies.append(self._try(self._receive_one))
            self._waiting -= 1
        return replies

    def ask(self, commands: Sequence[Command]) -> list[Reply]:
        """One round trip."""
        self.send(commands)
        return self.receive()

    def _receive_one(self) -> Reply:
        try:
            return self._connection.read_response()
        except redis.exceptions.AskError as e:  # MovedError is one, too
            moved = isinstance(e, redis.exceptions.MovedError)
            return Redirect(int(e.slot_id), (e.host or self._name.rpartition(":")[0], int(e.port)), asking=not moved)
        except redis.ResponseError as e:
            return Refusal(_code(e))

    def _try(self, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except (redis.RedisError, OSError, ValueError) as e:
            raise RetryableError(f"index: {type(e).__name__}", where=self._name) from None

    def close(self) -> None:
        if self._waiting:
            self._connection.disconnect()
        self._pool.release(self._connection)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def exchange(work: Sequence[tuple[Link, Sequence[Command]]]) -> list[list[Reply] | Broken]:
    """The same round trip for all: every server is asked before the first answer is awaited."""
    talks: list[Talk | Broken] = []
    try:
        talks.extend(_begin(link, commands) for link, commands in work)
        return [talk if isinstance(talk, Broken) else _end(talk) for talk in talks]
    finally:
        for talk in talks:
            if not isinstance(talk, Broken):
                talk.close()


def _begin(link: Link, commands: Sequence[Command]) -> Talk | Broken:
    try:
        talk = link.open()
    except RetryableError as e:
        return Broken(str(e))
    try:
        talk.send(commands)
    except RetryableError as e:
        talk.close()
        return Broken(str(e))
    return talk


def _end(talk: Talk) -> list[Reply] | Broken:
    try:
        return talk.receive()
    except RetryableError as e:
        return Broken(str(e))


def flush(unix_socket: str, username: str, password: str) -> None:
    """Empty the Redis behind `unix_socket`. RetryableError if it does not answer."""
    link = Link((unix_socket, 0), Login(username, password), _CONNECT_S)
    try:
        answer = link.ask([("FLUSHALL",)])
        if isinstance(answer, Broken):
            raise RetryableError(answer.reason)
        if isinstance(answer[0], Refusal):
            raise RetryableError(f"index: {answer[0].code}", where=unix_socket)
    finally:
        link.close()


_CODES = {
    redis.exceptions.OutOfMemoryError: "OOM",
    redis.exceptions.ReadOnlyError: "READONLY",
    redis.exceptions.NoPermissionError: "NOPERM",
    redis.exceptions.ExecAbortError: "EXECABORT",
    redis.exceptions.TryAgainError: "TRYAGAIN",
    redis.exceptions.MasterDownError: "MASTERDOWN",
    redis.exceptions.ClusterDownError: "CLUSTERDOWN",
    redis.exceptions.ClusterCrossSlotError: "CROSSSLOT",
}


def _code(error: redis.ResponseError) -> str:
    """The server's own word for it."""
    for kind, code in _CODES.items():
        if isinstance(error, kind):
            return code
    word = str(error).partition(" ")[0]
    return word if word.isupper() and word.isalpha() else "ERR"
