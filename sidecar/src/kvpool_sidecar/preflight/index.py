"""An index of the user's own: does it answer, does it let us in, is it new enough, may we do there what we must?"""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING

from kvpool.errors import KVPoolError
from kvpool.protocol import index_url
from kvpool_sidecar.index.credentials import Passwords
from kvpool_sidecar.index.redis_connection import ConnectionFailure, ErrorReply, Login
from kvpool_sidecar.index.redis_topology import RedisTopology
from kvpool_sidecar.preflight.finding import failed, fine, warned

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from kvpool.config import IndexConfig
    from kvpool_sidecar.index.redis_topology import RedisServer
    from kvpool_sidecar.preflight.finding import Finding

__all__ = ["look_at_index", "version_of"]

LEAST = (6, 2)
_SLOW_S = 3.0
_HINTS = {
    "NOAUTH": "give its password (passwordSecretRef)",
    "WRONGPASS": "check user and password",
    "NOPERM": "give the user the rights that docs/reference/prefix-index.md names",
    "READONLY": "give the URL of the master, or of the Sentinels",
    "AuthenticationError": "check user and password",
    "AuthenticationWrongNumberOfArgsError": "check user and password",
    "SSLError": "check the authority (caSecretRef) and the client's certificate",
}


def look_at_index(
    config: IndexConfig, passwords: Callable[[], tuple[str, ...]], files: Mapping[str, str]
) -> Iterator[Finding]:
    """Write, read and remove one key as a sidecar would, and ask each server which version it is."""
    try:
        url = index_url.parse(config.url)
    except KVPoolError as e:
        yield failed("Index", str(e), "correct the URL")
        return
    login = Login(
        config.username or url.username,
        Passwords(lambda: (*passwords(), url.password)),
        url.db,
        url.tls,
        files.get("ca", ""),
        files.get("cert", ""),
        files.get("key", ""),
    )
    servers = RedisTopology(url, login, _SLOW_S, _SLOW_S)
    try:
        name, value = f"s:preflight-{secrets.token_hex(8)}".encode(), secrets.token_bytes(16)
        started = time.monotonic()
        servers.execute([(b"SET", name, value, b"PX", 10_000)])
        (got,) = servers.execute([(b"GET", name)])
        servers.execute([(b"DEL", name)])
        ms = (time.monotonic() - started) * 1000 / 3
        if got != value:
            yield failed("Index", "it gives other bytes than it was told", "do not use it")
            return
        yield from _versions([server for server, _ in servers.servers()])
        yield _told(ms, config.lookup_timeout_ms)
    except KVPoolError as e:
        hint = next((h for code, h in _HINTS.items() if code in str(e)), "check the URL and the network policy")
        yield failed("Index", f"{url.public} cannot be used: {e}", hint)
    finally:
        servers.close()


def version_of(info: bytes) -> tuple[int, ...]:
    """Of INFO server; empty if it does not say. Valkey says which Redis it is like."""
    for line in info.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name == b"redis_version":
            return tuple(int(part) for part in value.split(b".")[:3] if part.isdigit())
    return ()


def _versions(servers: list[RedisServer]) -> Iterator[Finding]:
    for server in servers:
        answer = server.slow.execute([(b"INFO", b"server")])
        if isinstance(answer, ConnectionFailure) or isinstance(answer[0], ErrorReply):
            yield warned(
                "IndexVersion",
                f"{server.slow.name} does not tell its version",
                "allow the user INFO (docs/reference/prefix-index.md)",
            )
            continue
        version = version_of(answer[0])
        if version and version < LEAST:
            told = ".".join(map(str, version))
            yield failed("IndexVersion", f"{server.slow.name} is Redis {told}", "use Redis 6.2, Valkey 7.2 or newer")
        else:
            yield fine("IndexVersion", f"{server.slow.name} is like Redis {'.'.join(map(str, version)) or '?'}")


def _told(ms: float, lookup_ms: int) -> Finding:
    if ms > lookup_ms:
        return warned(
            "Index",
            f"an answer takes {ms:.1f} ms, and a lookup waits {lookup_ms} ms for it",
            "use an index that is nearer, or raise index.lookupTimeout",
            round_trip_ms=ms,
        )
    return fine("Index", f"answers in {ms:.1f} ms", round_trip_ms=ms)
