"""Checks of an external index: connection, authentication, version, and permissions."""

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
    from kvpool_sidecar.index.redis_slots import RedisServer
    from kvpool_sidecar.preflight.finding import Finding

__all__ = ["check_index", "version_of"]

MIN_VERSION = (6, 2)
_SLOW_S = 3.0
_HINTS = {
    "NOAUTH": "set its password (passwordSecretRef)",
    "WRONGPASS": "check user and password",
    "NOPERM": "grant the user the rights in docs/reference/prefix-index.md",
    "READONLY": "use the URL of the master, or of the Sentinels",
    "AuthenticationError": "check user and password",
    "AuthenticationWrongNumberOfArgsError": "check user and password",
    "SSLError": "check the CA (caSecretRef) and the client's certificate",
}


def check_index(
    config: IndexConfig, passwords: Callable[[], tuple[str, ...]], files: Mapping[str, str]
) -> Iterator[Finding]:
    """Write, read and delete one key as a sidecar does, and query the version of each server."""
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
            yield failed("Index", "the index returned other bytes than were written", "replace the index server")
            return
        yield from _versions([server for server, _ in servers.servers()])
        yield _latency(ms, config.lookup_timeout_ms)
    except KVPoolError as e:
        hint = next((h for code, h in _HINTS.items() if code in str(e)), "check the URL and the network policy")
        yield failed("Index", f"{url.public} cannot be used: {e}", hint)
    finally:
        servers.close()


def version_of(info: bytes) -> tuple[int, ...]:
    """Return the version in the reply to INFO server, or empty. Valkey reports its compatible Redis version."""
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
                f"{server.slow.name} does not report its version",
                "grant the user INFO (docs/reference/prefix-index.md)",
            )
            continue
        version = version_of(answer[0])
        if version and version < MIN_VERSION:
            number = ".".join(map(str, version))
            yield failed("IndexVersion", f"{server.slow.name} is Redis {number}", "use Redis 6.2, Valkey 7.2 or newer")
        else:
            yield fine(
                "IndexVersion", f"{server.slow.name} is compatible with Redis {'.'.join(map(str, version)) or '?'}"
            )


def _latency(ms: float, lookup_ms: int) -> Finding:
    if ms > lookup_ms:
        return warned(
            "Index",
            f"the index responds in {ms:.1f} ms, and a lookup waits {lookup_ms} ms: lookups will miss",
            "use an index with lower latency, or raise index.lookupTimeout",
            round_trip_ms=ms,
        )
    return fine("Index", f"responds in {ms:.1f} ms", round_trip_ms=ms)
