"""`kvpool-sidecar index-server`: a Valkey server and a helper process that rotates its passwords and answers probes.

The helper is forked before its parent becomes the server, so that the exit of the server ends the container. The
helper exits with the server. A changed Secret takes effect within seconds: the ACL file is written for the next start,
and ACL SETUSER changes the running server without closing connections. When a password is removed, connections that
authenticated with it are closed (CLIENT KILL): the sidecars have already reconnected with the new password, and an idle
connection that was closed is reopened at its next use.

With a server of another image the same work is divided: an init container writes what the server starts with (`--stage
prepare`), and a container beside it supervises the server over its unix socket (`--stage supervise`).
"""

from __future__ import annotations

import ctypes
import ipaddress
import logging
import os
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvpool.errors import ConfigError, KVPoolError
from kvpool_sidecar.index import redis_server as embedded
from kvpool_sidecar.system.http_server import BoundedHandler, BoundedHttpServer

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["RedisServerProcess", "prepare_index_server", "run_index_server", "supervise_index_server"]

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
        *,
        is_current: bool = True,
    ) -> None:
        self._home = home
        self._read = read
        self._known = known
        self._tls = tls
        self._certificate = tls.digest() if tls is not None and is_current else b""

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
    directory: str, options: embedded.ServerOptions, passwords: Callable[[], tuple[bytes, ...]], http_port: int
) -> None:
    """Become the Valkey server; does not return. ConfigError if it would listen beyond loopback without a password.

    `http_port` 0 disables the probes. With TLS the server must be built with it.
    """
    home, known = _prepare(directory, options, passwords)
    version = embedded.server_version(embedded.server_binary())
    log.info("the index server is %s", version)
    if options.tls is not None:
        log.info("the index accepts TLS only; a server without TLS ends with 'Failed finding TLS support'")
    command = embedded.server_command(home, version, options)
    server = os.getpid()
    if os.fork() == 0:
        try:
            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            process = RedisServerProcess(home, passwords, known, options.tls)
            _supervise(process, options.bind, http_port, lambda: os.getppid() == server)
        except Exception:
            log.exception("the helper process of the index server failed")
        finally:
            os._exit(1)
    os.execve(command[0], command, embedded.server_environment())  # noqa: S606 - no shell


def prepare_index_server(
    directory: str, options: embedded.ServerOptions, passwords: Callable[[], tuple[bytes, ...]]
) -> None:
    """Write what a server of another image starts with, `server.conf` first of all. ConfigError as run_index_server."""
    home, _ = _prepare(directory, options, passwords)
    embedded.write_config(home, options)


def supervise_index_server(
    directory: str, options: embedded.ServerOptions, passwords: Callable[[], tuple[bytes, ...]], http_port: int
) -> None:
    """Rotate passwords and certificate of the server that runs in `directory`, and answer probes, until SIGTERM."""
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())  # the first process of a container ignores it otherwise
    # nothing is known of the server, so it gets everything once
    process = RedisServerProcess(Path(directory).absolute(), passwords, (), options.tls, is_current=False)
    _supervise(process, options.bind, http_port, lambda: not ended.wait(0))


def _prepare(
    directory: str, options: embedded.ServerOptions, passwords: Callable[[], tuple[bytes, ...]]
) -> tuple[Path, tuple[bytes, ...]]:
    try:
        address = ipaddress.ip_address(options.bind)
    except ValueError:
        raise ConfigError(f"--bind: {options.bind!r} is not a numeric address") from None
    if address.is_unspecified:
        raise ConfigError("--bind: give one address; the index does not listen on all addresses")
    known = passwords()
    if not known and not address.is_loopback:
        raise ConfigError("the index needs a password to listen beyond loopback: create index-password in --secret-dir")
    return embedded.prepare(directory, known, keep=options.keep), known


def _supervise(process: RedisServerProcess, bind: str, http_port: int, goes_on: Callable[[], bool]) -> None:
    if http_port:
        BoundedHttpServer(bind, http_port, _handler(process), name="probes", threads=_PROBES).start()
    while goes_on():
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
