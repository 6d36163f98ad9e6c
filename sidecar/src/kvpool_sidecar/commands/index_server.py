"""`kvpool-sidecar index-server`: a Valkey server and a helper process that rotates its passwords and answers probes.

The helper is forked before its parent becomes the server, so that the exit of the server ends the container. The
helper exits with the server. A changed Secret takes effect within seconds: the ACL file is written for the next start,
and ACL SETUSER changes the running server without closing connections. When a password is removed, connections that
authenticated with it are closed (CLIENT KILL): the sidecars have already reconnected with the new password, and an idle
connection that was closed is reopened at its next use.
"""

from __future__ import annotations

import ctypes
import ipaddress
import logging
import os
import signal
import time
from typing import TYPE_CHECKING, Final

from kvpool.errors import ConfigError, KVPoolError
from kvpool_sidecar.index import redis_server as embedded
from kvpool_sidecar.system.http_server import BoundedHandler, BoundedHttpServer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["RedisServerProcess", "run_index_server"]

log = logging.getLogger(__name__)

_POLL_INTERVAL_S: Final = 1.0
_PING_S: Final = 2.0
_PROBES: Final = 4
_PR_SET_PDEATHSIG: Final = 1


class RedisServerProcess:
    """Password rotation and health of the Redis server that runs in `home`.

    `read` returns the current passwords, newest first; `known` are those the server started with.
    """

    def __init__(
        self,
        home: Path,
        read: Callable[[], tuple[bytes, ...]],
        known: tuple[bytes, ...],
        tls: embedded.ServerTls | None = None,
    ) -> None:
        self._home = home
        self._read = read
        self._known = known
        self._tls = tls
        self._certificate = tls.digest() if tls is not None else b""

    def update_passwords(self) -> bool:
        """Send changed passwords to the server; return whether they changed. KVPoolError if it does not answer."""
        try:
            current = self._read()
        except (ConfigError, OSError) as e:
            log.warning("cannot read the passwords of the index; the previous ones stay valid: %s", e)
            return False
        if current == self._known or not current:
            return False
        embedded.write_acl(self._home, current)
        embedded.load_passwords(self._home, current, show_out=not set(self._known) <= set(current))
        log.info("updated the passwords of the index: %d are valid", len(current))
        self._known = current
        return True

    def update_certificate(self) -> bool:
        """Reload a renewed certificate; return whether there was one. KVPoolError if the server does not take it."""
        if self._tls is None:
            return False
        current = self._tls.digest()
        if current == self._certificate:
            return False
        embedded.reload_certificate(self._home, self._tls)
        log.info("the index serves with a renewed certificate")
        self._certificate = current
        return True

    def state(self) -> str:
        """Return `PONG`, `LOADING` while the server reads its file, or empty if it does not answer in time."""
        try:
            return embedded.ping(self._home, _PING_S)
        except OSError:
            return ""


def run_index_server(
    directory: str,
    *,
    bind: str,
    port: int,
    http_port: int,
    max_memory: int,
    persist: bool,
    passwords: Callable[[], tuple[bytes, ...]],
    tls: embedded.ServerTls | None = None,
) -> None:
    """Become the Valkey server; does not return. ConfigError if it would listen beyond loopback without a password.

    `tls`: accept nothing but TLS; the server must be built with it.

    `http_port` 0 disables the probes. `persist`: entries survive a restart, in `directory`.
    """
    try:
        address = ipaddress.ip_address(bind)
    except ValueError:
        raise ConfigError(f"--bind: {bind!r} is not a numeric address") from None
    if address.is_unspecified:
        raise ConfigError("--bind: give one address; the index does not listen on all addresses")
    known = passwords()
    if not known and not address.is_loopback:
        raise ConfigError("the index needs a password to listen beyond loopback: create index-password in --secret-dir")
    home = embedded.prepare(directory, known, keep=persist)
    version = embedded.server_version(embedded.server_binary())
    log.info("the index server is %s", version)
    if tls is not None:
        log.info("the index accepts TLS only; a server without TLS ends with 'Failed finding TLS support'")
    command = embedded.server_command(home, version, bind=bind, port=port, max_memory=max_memory, keep=persist, tls=tls)
    server = os.getpid()
    if os.fork() == 0:
        try:
            _run_helper(RedisServerProcess(home, passwords, known, tls), bind=bind, http_port=http_port, server=server)
        except Exception:
            log.exception("the helper process of the index server failed")
        finally:
            os._exit(1)
    os.execve(command[0], command, embedded.server_environment())  # noqa: S606 - no shell


def _run_helper(process: RedisServerProcess, *, bind: str, http_port: int, server: int) -> None:
    """Run until the parent process `server` exits."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if http_port:
        BoundedHttpServer(bind, http_port, _handler(process), name="probes", threads=_PROBES).start()
    while os.getppid() == server:
        time.sleep(_POLL_INTERVAL_S)
        try:
            process.update_passwords()
            process.update_certificate()
        except (KVPoolError, OSError) as e:
            log.warning("cannot update the passwords or the certificate of the index server; retrying: %s", e)


def _handler(process: RedisServerProcess) -> type[BoundedHandler]:
    class Handler(BoundedHandler):
        """/healthz: the server answers or still loads. /readyz: it serves."""

        def do_GET(self) -> None:  # noqa: N802 - name fixed by the base class
            accepted = {"/healthz": ("PONG", "LOADING"), "/readyz": ("PONG",)}.get(self.path)
            if accepted is None:
                self.respond(404, "text/plain", b"/healthz /readyz\n")
                return
            state = process.state()
            self.respond(200 if state in accepted else 503, "text/plain", f"{state or 'no answer'}\n".encode())

    return Handler
