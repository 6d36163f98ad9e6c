"""Files of a pool without Kubernetes: secrets, configuration, and where everything lies below one directory."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvpool import config
from kvpool.errors import ConfigError

__all__ = ["SECRET_FILE", "TENANT", "Paths", "Ports", "pool_config", "size_of", "use_secret"]

TENANT: Final = "default"
SECRET_FILE: Final = "pool-secret"  # noqa: S105 - a name
_SECRET: Final = re.compile(r"[0-9a-f]{64}")
_SIZE: Final = re.compile(r"([0-9]{1,15})(Ki|Mi|Gi|Ti|k|M|G|T)?")
_UNITS: Final = {
    "": 1, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12
}  # fmt: skip
_MIN_CAPACITY: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class Ports:
    """TCP ports of one machine: four in a row."""

    first: int

    @property
    def index(self) -> int:
        return self.first

    @property
    def peer(self) -> int:
        return self.first + 1

    @property
    def http(self) -> int:
        return self.first + 2


@dataclass(frozen=True, slots=True)
class Paths:
    """Everything lies below `root`: blocks in `tier`, the rest in `home`, which only its owner may enter."""

    root: Path

    @property
    def tier(self) -> Path:
        return self.root / "blocks"

    @property
    def home(self) -> Path:
        return self.root / "node"

    @property
    def secret(self) -> Path:
        return self.home / "secret"

    @property
    def config(self) -> Path:
        return self.home / "pool.json"

    @property
    def socket(self) -> Path:
        return self.home / "kv.sock"

    @property
    def client(self) -> Path:
        return self.root / "client"

    @property
    def index(self) -> Path:
        return self.home / "index"

    def log(self, name: str) -> Path:
        return self.home / f"{name}.log"

    def create(self) -> None:
        """Create the directories. ConfigError if the path of the socket is too long for the kernel."""
        if len(os.fsencode(self.socket)) > 100:
            raise ConfigError(f"--path {self.root} is too long for a unix socket: choose a shorter one")
        self.tier.mkdir(parents=True, exist_ok=True)
        for directory in (self.home, self.secret):
            directory.mkdir(mode=0o700, exist_ok=True)
            directory.chmod(0o700)


def size_of(text: str) -> int:
    """Bytes of a quantity such as `64Gi` or `500G`, as Kubernetes writes them. ConfigError if it is none."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ConfigError(f"{text!r} is not a size: give a number with Ki, Mi, Gi, Ti, k, M, G or T, such as 64Gi")
    size = int(match[1]) * _UNITS[match[2] or ""]
    if size < _MIN_CAPACITY:
        raise ConfigError(f"--capacity {text} is below the minimum of 64Mi")
    return size


def use_secret(directory: Path, given: str) -> None:
    """Keep the secret of the pool in `directory`: that of the file `given`, else the one there, else a new one.

    The password of the index follows from it, so that one file is all that another machine needs. ConfigError if
    `given` holds no secret, or another one than the blocks in the pool's directory were stored with.
    """
    place = directory / SECRET_FILE
    kept = _read(place) if place.exists() else ""
    wanted = _read(Path(given)) if given else kept or secrets.token_hex(32)
    if kept and wanted != kept:
        raise ConfigError(f"{place} holds another secret than {given}: use an empty --path, or delete this one")
    _write(place, wanted)
    password = hmac.new(bytes.fromhex(wanted), b"kvpool index password", hashlib.sha256).hexdigest()
    _write(directory / "index-password", password)


def _read(path: Path) -> str:
    try:
        with path.open("r", encoding="ascii", errors="replace") as file:
            text = file.read(256).strip()
    except OSError as e:
        raise ConfigError(f"cannot read the pool's secret: {e}") from e
    if not _SECRET.fullmatch(text):
        raise ConfigError(f"{path} holds no pool secret: copy {SECRET_FILE} of the first machine")
    return text


def _write(path: Path, text: str) -> None:
    staged = path.with_name(f".{path.name}")
    descriptor = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(text)
    staged.replace(path)


def pool_config(paths: Paths, ports: Ports, capacity: int, index: tuple[str, int]) -> config.PoolConfig:
    """Configuration of this machine's sidecar: one local tier, and the index at `index`, a host and a port."""
    host, port = index
    return config.PoolConfig(
        pool="up",
        namespace="up",
        uid="kvpool-up",
        local=(config.LocalTier("local", str(paths.tier), capacity),),
        index=config.IndexConfig(f"redis://{host}:{port}/0", username="kvpool"),
        peer=config.PeerConfig(port=ports.peer),
        http_port=ports.http,
    )
