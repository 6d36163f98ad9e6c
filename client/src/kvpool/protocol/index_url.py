"""Address of a prefix index: read by the operator (user's Secret) and the sidecar (pool.json), not by clients.

========================================================= ==========================================================
`redis://host:port/db`                                    one Redis or Valkey
`redis+sentinel://host:port,host:port/service/db`         the master that these Sentinels name for `service`
`redis+cluster://host:port,host:port`                     a Redis Cluster; any of its nodes will do to begin with
`unix:///path`                                            one Redis on this machine
========================================================= ==========================================================

`rediss` instead of `redis` is TLS, to Sentinels too. `user:password@` may stand before the first host.
"""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import quote, unquote

from kvpool.errors import ConfigError

__all__ = ["FORMS", "IndexUrl", "parse"]

FORMS = "redis://host:port/db, redis+sentinel://host:port,.../service/db, redis+cluster://host:port,... or rediss..."
_SCHEMES = {
    "redis": ("single", 6379),
    "redis+sentinel": ("sentinel", 26379),
    "redis+cluster": ("cluster", 6379),
}
_MAX_TEXT = 2048
_MAX_ENDPOINTS = 64


class IndexUrl(NamedTuple):
    """A parsed address. `kind` is single, sentinel, cluster or unix (then `path` is set)."""

    kind: str
    tls: bool
    endpoints: tuple[tuple[str, int], ...]
    service: str = ""
    db: int = 0
    username: str = ""
    password: str = ""
    path: str = ""

    def __repr__(self) -> str:
        return f"IndexUrl({self.public})"

    @property
    def public(self) -> str:
        """The address without user and password, in its normal form."""
        if self.kind == "unix":
            return f"unix://{self.path}"
        scheme = ("rediss" if self.tls else "redis") + ("" if self.kind == "single" else f"+{self.kind}")
        hosts = ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.endpoints)
        rest = {"single": f"/{self.db}", "sentinel": f"/{quote(self.service, safe='')}/{self.db}", "cluster": ""}
        return f"{scheme}://{hosts}{rest[self.kind]}"


def parse(text: str) -> IndexUrl:
    """ConfigError, which repeats nothing of the text, if it is none of the forms."""
    scheme, separator, rest = text.strip().partition("://")
    if not separator or len(text) > _MAX_TEXT:
        raise ConfigError(f"index.url: not a URL; it should hold {FORMS}")
    rest = rest.partition("?")[0].partition("#")[0]
    if scheme == "unix" and rest.startswith("/"):
        return IndexUrl("unix", tls=False, endpoints=(), path=rest)
    tls = scheme == "rediss" or scheme.startswith("rediss+")
    kind, port = _SCHEMES.get(scheme.replace("rediss", "redis", 1), ("", 0))
    if not kind:
        raise ConfigError(f"index.url: unknown scheme; it should hold {FORMS}")
    authority, _, path = rest.partition("/")
    login, _, hosts = authority.rpartition("@")
    username, _, password = login.partition(":")
    endpoints = tuple(_endpoint(host, port) for host in hosts.split(","))
    if len(endpoints) > (1 if kind == "single" else _MAX_ENDPOINTS):
        raise ConfigError("index.url: one host for a single Redis, at most 64 for Sentinel and Cluster")
    service, db = "", path
    if kind == "sentinel":
        service, _, db = path.partition("/")
        if not service:
            raise ConfigError("index.url: after the Sentinels' addresses comes /service, the name of the master there")
    if db and not (db.isascii() and db.isdigit() and len(db) <= 5):
        raise ConfigError("index.url: the last part is the number of a database")
    if kind == "cluster" and int(db or 0):
        raise ConfigError("index.url: a Redis Cluster has database 0 only")
    return IndexUrl(kind, tls, endpoints, unquote(service), int(db or 0), unquote(username), unquote(password))


def _endpoint(text: str, default_port: int) -> tuple[str, int]:
    if text.startswith("["):
        host, bracket, port = text[1:].partition("]")
        is_wrong = not bracket or (port and not port.startswith(":"))
        port = port[1:]
    else:
        host, _, port = text.partition(":")
        is_wrong = False
    if is_wrong or not host or any(c.isspace() for c in host) or (port and not (port.isascii() and port.isdigit())):
        raise ConfigError("index.url: each host is a name or address, with :port or without")
    number = int(port) if port else default_port
    if not 0 < number < 65536:
        raise ConfigError("index.url: a port is a number from 1 to 65535")
    return host, number
