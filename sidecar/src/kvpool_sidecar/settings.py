"""Validated settings from flags, environment and files. ConfigError names the fix."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from kvpool.config import PoolConfig, loads
from kvpool.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "INDEX_PASSWORD",
    "INDEX_PREVIOUS",
    "POOL_SECRET",
    "SHARED_KEYS",
    "ConfigFile",
    "ServeSettings",
    "fixed_sockets",
    "index_files",
    "index_passwords",
    "index_server_files",
    "own_address",
    "read_config",
    "read_secret",
    "read_text",
]

POOL_SECRET = "pool-secret"  # noqa: S105 - the name of a file
INDEX_PASSWORD = "index-password"  # noqa: S105
INDEX_PREVIOUS = "index-password-previous"
"""Previous password during a rotation; otherwise empty or missing."""
SHARED_KEYS = "shared-keys.json"
"""Keys of encrypted blocks on the shared tier (kvpool_sidecar.storage.shared.key_ring)."""
_INDEX_FILES = {"ca": "index-ca.crt", "cert": "index-client.crt", "key": "index-client.key"}
_MIN_SECRET = 16
_MAX_FILE = 1 << 20


@dataclass(frozen=True)
class ConfigFile:
    """Path of the pool's configuration and its text at the start."""

    path: str
    text: str  # at the start of the process
    adapt: Callable[[PoolConfig], PoolConfig] = lambda config: config  # applies the flags that override it

    def read(self) -> str:
        """Return the current text. ConfigError if it cannot be read."""
        return read_text(self.path)


@dataclass(frozen=True)
class ServeSettings:
    """Settings of `kvpool-sidecar serve`."""

    config: PoolConfig
    secret: bytes
    node: str
    address: str
    index_files: dict[str, str] = field(default_factory=dict)  # result of index_files()
    secret_dir: str = ""
    issuer_url: str = ""  # of the operator, which issues this node's certificate; empty: signed here
    issuer_token: str = ""  # file with the pod's token for the operator
    rendezvous_socket: str = ""
    sockets: dict[str, str] = field(default_factory=dict)  # tenant by socket path
    read_only_mounts: tuple[str, str] = ("/tiers", "/tiers-ro")
    config_file: ConfigFile | None = None
    object_secret_dir: str = ""  # credentials of the object store, one file each
    metrics_per_tenant: bool = False
    allow_takeover: bool = False  # take drives over from, and hand them over to, another sidecar of this node

    def __post_init__(self) -> None:
        own_address(self.address)
        if not self.node:
            raise ConfigError("--node: the node's name is required (KVPOOL_NODE)")
        if not self.rendezvous_socket and not self.sockets:
            raise ConfigError("set --rendezvous-socket (in Kubernetes) or at least one --socket PATH=TENANT")
        if len(self.secret) < _MIN_SECRET:
            raise ConfigError(f"the pool's secret is shorter than {_MIN_SECRET} bytes")

    def secret_file(self, name: str) -> bytes:
        """Return the current content of a file in the secret directory; empty if the file is missing."""
        return read_secret(self.secret_dir, name, optional=True) if self.secret_dir else b""

    def index_passwords(self) -> tuple[str, ...]:
        """Return the current passwords, newest first; none if the index has none. ConfigError if unreadable."""
        if not self.secret_dir:
            return ()
        return tuple(p.decode("ascii", "replace") for p in index_passwords(self.secret_dir))

    def read_path(self, path: str) -> str | None:
        """Return the read-only mount of the tier at `path`; None if there is none."""
        writable, read_only = self.read_only_mounts
        if writable and path.startswith(f"{writable}/"):
            candidate = read_only + path[len(writable) :]
            if os.path.isdir(candidate):
                return candidate
        return None


def own_address(text: str) -> str:
    """Return the numeric address. ConfigError for wildcard and multicast addresses."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        raise ConfigError(f"--address: {text!r} is not a numeric address") from None
    if address.is_unspecified or address.is_multicast:
        raise ConfigError("--address: give the pod's own address; a sidecar does not listen on all addresses")
    return text


def read_config(path: str) -> PoolConfig:
    """Return the pool's configuration. ConfigError if it is missing or invalid."""
    return loads(PoolConfig, read_text(path), where=path)


def read_text(path: str) -> str:
    """Return the text of the pool's configuration. ConfigError if it is missing."""
    return _read(path).decode("utf-8", "replace")


def read_secret(directory: str, name: str, *, optional: bool = False) -> bytes:
    """Return a file of the secret directory, stripped of white space. ConfigError if it is missing."""
    path = Path(directory, name)
    if optional and not path.exists():
        return b""
    return _read(str(path)).strip()


def index_passwords(directory: str) -> tuple[bytes, ...]:
    """Return the valid passwords of the index, newest first. ConfigError if a file cannot be read."""
    passwords = (read_secret(directory, name, optional=True) for name in (INDEX_PASSWORD, INDEX_PREVIOUS))
    return tuple(dict.fromkeys(p for p in passwords if p))


def index_files(directory: str) -> dict[str, str]:
    """Return the paths of the existing TLS files for the index: `ca`, `cert`, `key`. Without `ca`, system CAs apply."""
    files = {what: str(Path(directory, name)) for what, name in _INDEX_FILES.items() if Path(directory, name).exists()}
    if ("cert" in files) != ("key" in files):
        raise ConfigError("index-client.crt and index-client.key must exist together", where=directory)
    return files


def index_server_files(directory: str) -> tuple[str, str]:
    """Return the paths of the managed index's certificate and key. ConfigError if one is missing."""
    paths = [str(Path(directory, name)) for name in ("index-server.crt", "index-server.key")]
    for path in paths:
        if not Path(path).exists():
            raise ConfigError("--tls needs this file", where=path)
    return paths[0], paths[1]


def fixed_sockets(pairs: list[str]) -> dict[str, str]:
    """Parse `PATH=TENANT` pairs into tenants by path. ConfigError."""
    sockets: dict[str, str] = {}
    for pair in pairs:
        path, separator, tenant = pair.rpartition("=")
        if not separator or not path or not tenant:
            raise ConfigError(f"--socket: expected PATH=TENANT, got {pair!r}")
        sockets[path] = tenant
    return sockets


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(_MAX_FILE)
    except OSError as e:
        raise ConfigError(f"cannot read the file: {e.strerror}", where=path) from None
