"""Connections to one Redis or Valkey server. The only module that knows the library `redis`; protocol RESP2.

A connection that broke off in the middle of an exchange, for whatever reason, is closed and never used again, so an
answer can never be taken for that of another question (CVE-2023-28858).
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
    """How to get in. `ca`, `cert` and `key` are paths, read anew for each connection like the passwords: all rotate."""

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
    """An error that the server answered: its code, such as OOM, READONLY, NOPERM or ERR."""

    code: str


class Redirect(NamedTuple):
    """The server sends us elsewhere; `asking`: for this once."""

    slot: int
    target: Target
    asking: bool


class ConnectionFailure(NamedTuple):
    """No answers: what went wrong on the way. `ended`: the server closed the connection, which may have been old."""

    reason: str
    ended: bool = False


class _Credentials(CredentialProvider):
    """What a connection that this thread makes shows; the library asks for it when it makes one."""

    def __init__(self, login: Login) -> None:
        self._username = login.username
        self._passwords = login.passwords
        self._turn = threading.local()

    def connect(self, pool: ConnectionPool) -> Any:
        """A connection of the pool, a new one with the newest password that the server takes."""
        refused: redis.AuthenticationError | None = None
        for password in self._passwords.candidates():
            self._turn.password, self._turn.is_shown = password, False
            try:
                connection = pool.get_connection()
            except redis.AuthenticationError as e:
                refused = e
                continue
            if self._turn.is_shown:
                self._passwords.accept(password)
            return connection
        raise refused or redis.AuthenticationError

    def get_credentials(self) -> Any:
        """Empty where there is no password."""
        password = getattr(self._turn, "password", "")
        self._turn.is_shown = True
        if not password:
            return ()
        return (self._username, password) if self._username else (password,)


class RedisConnection:
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

    def open(self) -> Exchange:
        """One connection for several exchanges; for `with`. Broken as an exception: RetryableError."""
        return Exchange(self._pool, self._entry, self.name)

    def execute(self, commands: Sequence[Command]) -> list[Reply] | ConnectionFailure:
        """One round trip."""
        return execute_all([(self, commands)])[0]

    def warm(self, connections: int) -> ConnectionFailure | None:
        """Have so many connections ready."""
        held: list[Exchange] = []
        try:
            for _ in range(connections):
                held.append(self.open())  # noqa: PERF401 - those made before a failure are given back
        except RetryableError as e:
            return ConnectionFailure(str(e))
        finally:
            for talk in held:
                talk.close()
        return None

    def close(self) -> None:
        """Let go of the connections that nobody is using."""
        self._pool.disconnect(inuse_connections=False)


class Exchange:
    """One borrowed connection. Given back whole, or closed. Not thread-safe."""

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
        """All answers that are due, in order. RetryableError if the connection broke."""
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
    """Not a time that ran out, and not a server that takes no connection."""
    return type(error) is redis.ConnectionError and not isinstance(error.__cause__, ConnectionRefusedError)


def execute_all(work: Sequence[tuple[RedisConnection, Sequence[Command]]]) -> list[list[Reply] | ConnectionFailure]:
    """The same round trip for all: every server is asked before the first answer is awaited."""
    talks: list[Exchange | ConnectionFailure] = []
    try:
        talks.extend(_begin(link, commands) for link, commands in work)
        return [talk if isinstance(talk, ConnectionFailure) else _end(talk) for talk in talks]
    finally:
        for talk in talks:
            if not isinstance(talk, ConnectionFailure):
                talk.close()


def _begin(link: RedisConnection, commands: Sequence[Command]) -> Exchange | ConnectionFailure:
    try:
        talk = link.open()
    except RetryableError as e:
        return ConnectionFailure(str(e))
    try:
        talk.send(commands)
    except RetryableError as e:
        talk.close()
        return ConnectionFailure(str(e), isinstance(e, _EndedError))
    return talk


def _end(talk: Exchange) -> list[Reply] | ConnectionFailure:
    try:
        return talk.receive()
    except RetryableError as e:
        return ConnectionFailure(str(e), isinstance(e, _EndedError))


def execute_once(unix_socket: str, username: str, password: str, *commands: Command) -> list[Reply]:
    """Ask the Redis behind `unix_socket` once. RetryableError if it does not answer or refuses one of them."""
    link = RedisConnection((unix_socket, 0), Login(username, Passwords.fixed(password)), _CONNECT_S)
    try:
        answer = link.execute(commands)
        if isinstance(answer, ConnectionFailure):
            raise RetryableError(answer.reason)
        for refusal in (a for a in answer if isinstance(a, ErrorReply)):
            raise RetryableError(f"index: {refusal.code}", where=unix_socket)
        return answer
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
