"""`kvpool-sidecar index`: a Redis server, and beside it an attendant that gives it the passwords that are good now and
answers the kubelet's probes.

The attendant is forked before its parent becomes the Redis server, so that what ends the server ends the container. It
goes when the server goes. A changed Secret is taken within seconds of its arrival: the ACL file is written for the
next start and the running server is told by ACL SETUSER, which leaves connections alone. Once a password is gone, what
was let in with it is shown out (CLIENT KILL): the sidecars have long made their connections with the new one, and a
connection that ends while it rests is made anew by its next use.
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

__all__ = ["RedisServerProcess", "run_index"]

log = logging.getLogger(__name__)

_LOOK_S: Final = 1.0
_PING_S: Final = 2.0
_PROBES: Final = 4
_PR_SET_PDEATHSIG: Final = 1


class RedisServerProcess:
    """`read` gives the passwords as they are now, the newest first; `known` are those that the server started with."""

    def __init__(self, home: Path, read: Callable[[], tuple[bytes, ...]], known: tuple[bytes, ...]) -> None:
        self._home = home
        self._read = read
        self._known = known

    def look(self) -> bool:
        """Tell the server if the passwords changed; whether they did. KVPoolError if it does not answer."""
        try:
            wanted = self._read()
        except (ConfigError, OSError) as e:
            log.warning("the passwords cannot be read; those known before are good: %s", e)
            return False
        if wanted == self._known or not wanted:
            return False
        embedded.write_acl(self._home, wanted)
        embedded.tell_passwords(self._home, wanted, show_out=not set(self._known) <= set(wanted))
        log.info("%d passwords are good now", len(wanted))
        self._known = wanted
        return True

    def state(self) -> str:
        """`PONG`; `LOADING` while it reads its file; empty where it does not answer in time."""
        try:
            return embedded.ping(self._home, _PING_S)
        except OSError:
            return ""


def run_index(
    directory: str,
    *,
    bind: str,
    port: int,
    http_port: int,
    max_memory: int,
    keep: bool,
    passwords: Callable[[], tuple[bytes, ...]],
) -> None:
    """Become the Redis server; does not return. ConfigError if it would listen without a password beyond loopback.

    `http_port` 0: no probes are answered. `keep`: entries outlive the server, in `directory`.
    """
    try:
        address = ipaddress.ip_address(bind)
    except ValueError:
        raise ConfigError(f"--bind: {bind!r} is not a numeric address") from None
    if address.is_unspecified:
        raise ConfigError("--bind: give one address; the index does not listen on all of them")
    known = passwords()
    if not known and not address.is_loopback:
        raise ConfigError("the index needs a password to listen beyond loopback: put index-password in --secret-dir")
    home = embedded.prepare(directory, known, keep=keep)
    command = embedded.server_command(home, bind=bind, port=port, max_memory=max_memory, keep=keep)
    server = os.getpid()
    if os.fork() == 0:
        try:
            _attend(RedisServerProcess(home, passwords, known), bind=bind, http_port=http_port, server=server)
        except Exception:
            log.exception("the index's attendant ends")
        finally:
            os._exit(1)
    os.execve(command[0], command, embedded.server_environment())  # noqa: S606 - no shell is wanted


def _attend(attendant: RedisServerProcess, *, bind: str, http_port: int, server: int) -> None:
    """Until process `server`, which is this one's parent, is gone."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if http_port:
        BoundedHttpServer(bind, http_port, _handler(attendant), name="probes", threads=_PROBES).start()
    while os.getppid() == server:
        time.sleep(_LOOK_S)
        try:
            attendant.look()
        except (KVPoolError, OSError) as e:
            log.warning("the passwords are told to the server again soon: %s", e)


def _handler(attendant: RedisServerProcess) -> type[BoundedHandler]:
    class Handler(BoundedHandler):
        """/healthz: the server answers, though it may be loading. /readyz: it serves."""

        def do_GET(self) -> None:  # noqa: N802  the library's name for it
            good = {"/healthz": ("PONG", "LOADING"), "/readyz": ("PONG",)}.get(self.path)
            if good is None:
                self.answer(404, "text/plain", b"/healthz /readyz\n")
                return
            state = attendant.state()
            self.answer(200 if state in good else 503, "text/plain", f"{state or 'no answer'}\n".encode())

    return Handler
