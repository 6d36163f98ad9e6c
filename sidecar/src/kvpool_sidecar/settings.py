"""What a process is told by flags and environment, checked. ConfigError says what to change."""

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
    "ConfigFile",
    "ServeSettings",
    "fixed_sockets",
    "index_files",
    "index_passwords",
    "own_address",
    "read_config",
    "read_secret",
    "read_text",
]

POOL_SECRET = "pool-secret"  # noqa: S105 - the name of a file
INDEX_PASSWORD = "index-password"  # noqa: S105
INDEX_PREVIOUS = "index-password-previous"
"""The one before it, while it is being changed; else empty or not there."""
_INDEX_FILES = {"ca": "index-ca.crt", "cert": "index-client.crt", "key": "index-client.key"}
_MIN_SECRET = 16
_MAX_FILE = 1 << 20


@dataclass(frozen=True)
class ConfigFile:
    """Where the pool's configuration came from, and where its successors will be found."""

    path: str
    text: str  # as it was at the start
    adapt: Callable[[PoolConfig], PoolConfig] = lambda config: config  # what flags say instead

    def read(self) -> str:
        """As it is now. ConfigError."""
        return read_text(self.path)


@dataclass(frozen=True)
class ServeSettings:
    """Of `kvpool-sidecar serve`."""

    config: PoolConfig
    secret: bytes
    node: str
    address: str
    index_files: dict[str, str] = field(default_factory=dict)  # of index_files()
    secret_dir: str = ""
    handoff: str = ""
    sockets: dict[str, str] = field(default_factory=dict)  # path of a socket: tenant
    tiers_ro: tuple[str, str] = ("/tiers", "/tiers-ro")
    config_file: ConfigFile | None = None
    object_secret_dir: str = ""  # credentials of the object store, one file each
    tenant_labels: bool = False  # whether metrics are told by tenant
    overlap: bool = False  # whether drives are taken over from, and handed over to, another sidecar of this node

    def __post_init__(self) -> None:
        own_address(self.address)
        if not self.node:
            raise ConfigError("--node: the node's name is needed (KVPOOL_NODE)")
        if not self.handoff and not self.sockets:
            raise ConfigError("give --handoff (in Kubernetes) or at least one --socket PATH=TENANT")
        if len(self.secret) < _MIN_SECRET:
            raise ConfigError(f"the pool's secret is shorter than {_MIN_SECRET} bytes")

    def secret_file(self, name: str) -> bytes:
        """A file of the secret's directory as it is now; empty if it is not there."""
        return read_secret(self.secret_dir, name, optional=True) if self.secret_dir else b""

    def index_passwords(self) -> tuple[str, ...]:
        """As they are now, the newest first; none for an index without. ConfigError if a file cannot be read."""
        if not self.secret_dir:
            return ()
        return tuple(p.decode("ascii", "replace") for p in index_passwords(self.secret_dir))

    def read_path(self, path: str) -> str | None:
        """Where the tier at `path` is mounted read-only; None if it is not."""
        here, there = self.tiers_ro
        if here and path.startswith(f"{here}/"):
            candidate = there + path[len(here) :]
            if os.path.isdir(candidate):
                return candidate
        return None


def own_address(text: str) -> str:
    """The address, which is this pod's or machine's own. ConfigError for anything that stands for more than one."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        raise ConfigError(f"--address: {text!r} is not a numeric address") from None
    if address.is_unspecified or address.is_multicast:
        raise ConfigError("--address: give the pod's own address; a sidecar does not listen on all of them")
    return text


def read_config(path: str) -> PoolConfig:
    """The pool's configuration. ConfigError if there is none or it is wrong."""
    return loads(PoolConfig, read_text(path), where=path)


def read_text(path: str) -> str:
    """The text of the pool's configuration. ConfigError if there is none."""
    return _read(path).decode("utf-8", "replace")


def read_secret(directory: str, name: str, *, optional: bool = False) -> bytes:
    """A file of the secret's directory, without white space around it. ConfigError if it is missing."""
    path = Path(directory, name)
    if optional and not path.exists():
        return b""
    return _read(str(path)).strip()


def index_passwords(directory: str) -> tuple[bytes, ...]:
    """The passwords of the index that are good now, the newest first. ConfigError if a file cannot be read."""
    found = (read_secret(directory, name, optional=True) for name in (INDEX_PASSWORD, INDEX_PREVIOUS))
    return tuple(dict.fromkeys(p for p in found if p))


def index_files(directory: str) -> dict[str, str]:
    """Paths of those files for TLS to the index that are there: `ca`, `cert`, `key`. Without `ca`, the system's CAs."""
    found = {what: str(Path(directory, name)) for what, name in _INDEX_FILES.items() if Path(directory, name).exists()}
    if ("cert" in found) != ("key" in found):
        raise ConfigError("index-client.crt and index-client.key are needed together", where=directory)
    return found


def fixed_sockets(pairs: list[str]) -> dict[str, str]:
    """`PATH=TENANT` pairs."""
    found: dict[str, str] = {}
    for pair in pairs:
        path, separator, tenant = pair.rpartition("=")
        if not separator or not path or not tenant:
            raise ConfigError(f"--socket: PATH=TENANT is needed, not {pair!r}")
        found[path] = tenant
    return found


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(_MAX_FILE)
    except OSError as e:
        raise ConfigError(f"cannot be read: {e.strerror}", where=path) from None
