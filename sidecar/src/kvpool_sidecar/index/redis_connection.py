"""Connections to one Redis or Valkey server. The only module that imports the library `redis`; protocol RESP2.

A connection that broke off in the middle of an exchange, for whatever reason, is closed and never used again, so an
reply can never be taken for that of another question (CVE-2023-28858).
"""

from __future__ import annotations

import ssl
import threading
from typing import TYPE_CHECKING, Any, NamedTuple, Self, cast

import hiredis
import redis
from redis.backoff import NoBackoff
from redis.connection import Connection, ConnectionPool, SSLConnection, UnixDomainSocketConnection
from redis.credentials import CredentialProvider
from redis.retry import Retry

from kvpool.errors import RetryableError
from kvpool_sidecar.index.credentials import Passwords

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = [
    "Command",
    "ConnectionFailure",
    "ErrorReply",
    "Login",
    "Redirect",
    "RedisConnection",
    "Reply",
    "Target",
    "execute_all",
    "execute_once",
]

Command = tuple[bytes | str | int, ...]
Reply = Any
"""bytes, int, None, a list of replies, or a Refusal."""
Target = tuple[str, int]
"""Host and port; port 0: `host` is the path of a unix socket."""
_CONNECT_S = 2.0
_pack = cast("Callable[[Command], bytes]", hiredis.pack_command)  # its stub knows commands of one word only


class Login(NamedTuple):
    """Login data. `ca`, `cert` and `key` are paths, read for each connection like the passwords: all may be rotated."""

    username: str = ""
    passwords: Passwords = Passwords.fixed("")
    db: int = 0
    tls: bool = False
    ca: str = ""
    cert: str = ""
    key: str = ""

    def __repr__(self) -> str:
        return f"Login({self.username!r}, tls={self.tls})"


class ErrorReply(NamedTuple):
    """An error reply of the server: its code, such as OOM, READONLY, NOPERM or ERR."""

    code: str


class Redirect(NamedTuple):
    """A MOVED reply, or with `asking` an ASK reply: the redirect is for one command only."""

    slot: int
    target: Target
    asking: bool


class ConnectionFailure(NamedTuple):
    """No reply, and the reason. `ended`: the server closed the connection, which may have been idle for long."""

    reason: str
    ended: bool = False


class _Credentials(CredentialProvider):
    """Credentials of the connections that this thread opens; the library calls it for each."""

    def __init__(self, login: Login) -> None:
        self._username = login.username
        self._passwords = login.passwords
        self._attempt = threading.local()
        self.opened = 0  # connections until now

    def connect(self, pool: ConnectionPool) -> Any:
        """Take a connection of the pool; a new one logs in with the newest password that the server accepts."""
        refused: redis.AuthenticationError | None = None
        for password in self._passwords.candidates():
            self._attempt.password, self._attempt.is_shown = password, False
            try:
                connection = pool.get_connection()
            except redis.AuthenticationError as e:
                refused = e
                continue
            if self._attempt.is_shown:
                self._passwords.accept(password)
            return connection
        raise refused or redis.AuthenticationError

    def get_credentials(self) -> Any:
        """Return user and password; empty without a password."""
        password = getattr(self._attempt, "password", "")
        self._attempt.is_shown = True
        self.opened += 1
        if not password:
            return ()
        return (self._username, password) if self._username else (password,)


class RedisConnection:
    """A pool of connections to one server. Thread-safe. Connects on demand, or in advance by `warm`."""

    def __init__(self, target: Target, login: Login, timeout_s: float) -> None:
        self.target = target
        options: dict[str, Any] = {
            "db": login.db,
            "socket_timeout": timeout_s,
            "retry": Retry(NoBackoff(), 0),
            "protocol": 2,
            "driver_info": None,
        }
        self._entry = _Credentials(login)
        options["credential_provider"] = self._entry
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

    @property
    def opened(self) -> int:
        """Number of connections that were opened until now: it changes when the server is another process."""
        return self._entry.opened

    def open(self) -> Exchange:
        """Borrow one connection for several round trips; for `with`. RetryableError if it cannot connect."""
        return Exchange(self._pool, self._entry, self.name)

    def execute(self, commands: Sequence[Command]) -> list[Reply] | ConnectionFailure:
        """One round trip."""
        return execute_all([(self, commands)])[0]

    def warm(self, connections: int) -> ConnectionFailure | None:
        """Open `connections` connections in advance."""
        held: list[Exchange] = []
        try:
            for _ in range(connections):
                held.append(self.open())  # noqa: PERF401 - connections opened before a failure are returned
        except RetryableError as e:
            return ConnectionFailure(str(e))
        finally:
            for exchange in held:
                exchange.close()
        return None

    def close(self) -> None:
        """Close the idle connections."""
        self._pool.disconnect(inuse_connections=False)


class Exchange:
    """One borrowed connection: returned to the pool if it is intact, closed otherwise. Not thread-safe."""

    def __init__(self, pool: ConnectionPool, entry: _Credentials, name: str) -> None:
        self._pool = pool
        self._name = name
        self._waiting = 0
        self._connection: Any = self._try(lambda: entry.connect(pool))

    def send(self, commands: Sequence[Command]) -> None:
        """RetryableError if the connection broke."""
        self._waiting += len(commands)
        packed = [b"".join(map(_pack, commands))]
        self._try(lambda: self._connection.send_packed_command(packed, check_health=False))

    def receive(self) -> list[Reply]:
        """Read all outstanding replies, in order. RetryableError if the connection broke."""
        replies = []
        while self._waiting:
            replies.append(self._try(self._receive_one))
            self._waiting -= 1
        return replies

    def execute(self, commands: Sequence[Command]) -> list[Reply]:
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
            return ErrorReply(_code(e))

    def _try(self, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except (redis.RedisError, OSError, ValueError) as e:
            kind = _EndedError if _is_end(e) else RetryableError
            raise kind(f"index: {type(e).__name__}", where=self._name) from None

    def close(self) -> None:
        if self._waiting:
            self._connection.disconnect()
        self._pool.release(self._connection)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _EndedError(RetryableError):
    """The server closed the connection."""


def _is_end(error: Exception) -> bool:
    """Return whether the server closed the connection: no timeout, and no refused connection."""
    return type(error) is redis.ConnectionError and not isinstance(error.__cause__, ConnectionRefusedError)


def execute_all(work: Sequence[tuple[RedisConnection, Sequence[Command]]]) -> list[list[Reply] | ConnectionFailure]:
    """Execute on several servers in one round trip: all requests are sent before the first reply is read."""
    exchanges: list[Exchange | ConnectionFailure] = []
    try:
        exchanges.extend(_begin(link, commands) for link, commands in work)
        return [exchange if isinstance(exchange, ConnectionFailure) else _end(exchange) for exchange in exchanges]
    finally:
        for exchange in exchanges:
            if not isinstance(exchange, ConnectionFailure):
                exchange.close()


def _begin(link: RedisConnection, commands: Sequence[Command]) -> Exchange | ConnectionFailure:
    try:
        exchange = link.open()
    except RetryableError as e:
        return ConnectionFailure(str(e))
    try:
        exchange.send(commands)
    except RetryableError as e:
        exchange.close()
        return ConnectionFailure(str(e), isinstance(e, _EndedError))
    return exchange


def _end(exchange: Exchange) -> list[Reply] | ConnectionFailure:
    try:
        return exchange.receive()
    except RetryableError as e:
        return ConnectionFailure(str(e), isinstance(e, _EndedError))


def execute_once(unix_socket: str, username: str, password: str, *commands: Command) -> list[Reply]:
    """Execute commands once on the Redis at `unix_socket`. RetryableError without a reply, or for an error reply."""
    link = RedisConnection((unix_socket, 0), Login(username, Passwords.fixed(password)), _CONNECT_S)
    try:
        reply = link.execute(commands)
        if isinstance(reply, ConnectionFailure):
            raise RetryableError(reply.reason)
        for refusal in (a for a in reply if isinstance(a, ErrorReply)):
            raise RetryableError(f"index: {refusal.code}", where=unix_socket)
        return reply
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
    """Return the error code of the reply."""
    for kind, code in _CODES.items():
        if isinstance(error, kind):
            return code
    word = str(error).partition(" ")[0]
    return word if word.isupper() and word.isalpha() else "ERR"
