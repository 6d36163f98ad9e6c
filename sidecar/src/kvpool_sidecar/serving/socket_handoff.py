"""Takes pods' listening sockets from the rendezvous container. docs/contribute/design/contracts.md, "Sidecar pod"."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import threading
from typing import TYPE_CHECKING, Any

from kvpool.errors import ProtocolError, RefusedError
from kvpool.protocol import wire
from kvpool_sidecar.tenancy.identity import Identity

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Handoff"]

log = logging.getLogger(__name__)

_MAX_MESSAGE = 4096
_MAX_FDS = 4
_UCRED = struct.Struct("3i")


class Handoff:
    """Listens at `path`; one rendezvous at a time, the newest. OSError if the path cannot be bound.

    `add` may raise RefusedError: the rendezvous is told. `sync` gets the uids that the rendezvous knows of once it has
    told all: what is not among them is gone.
    """

    def __init__(
        self,
        path: str,
        *,
        add: Callable[[Identity, socket.socket], None],
        remove: Callable[[str], None],
        sync: Callable[[set[str]], None],
    ) -> None:
        self._path = path
        self._add = add
        self._remove = remove
        self._sync = sync
        self._lock = threading.Lock()
        self._peer: socket.socket | None = None
        self._stopped = threading.Event()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(path)
        # the rendezvous runs as root without the right to override modes; who it is is checked when it connects
        os.chmod(path, 0o666)  # noqa: S103
        self._listener.listen(4)

    @property
    def connected(self) -> bool:
        """Is a rendezvous there?"""
        with self._lock:
            return self._peer is not None

    def start(self) -> None:
        threading.Thread(target=self._accept, name="handoff", daemon=True).start()

    def ask_again(self) -> None:
        """Have the rendezvous tell all of its pods anew: other ones may be served now."""
        with self._lock:
            if self._peer is not None:
                with contextlib.suppress(OSError):
                    self._peer.shutdown(socket.SHUT_RDWR)

    def rest(self) -> None:
        """Have the rendezvous let go of the pods' sockets, for another sidecar's to take their place."""
        with self._lock:
            if self._peer is not None:
                with contextlib.suppress(OSError):
                    self._peer.sendall(wire.pack_json({"op": "rest"}))

    def stop(self) -> None:
        """Close; the rendezvous keeps the pods' sockets for the next server."""
        self._stopped.set()
        with self._lock:
            doomed = [self._listener, self._peer]
        for sock in doomed:
            if sock is not None:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while not self._stopped.is_set():
            try:
                sock, _ = self._listener.accept()
            except OSError as e:
                if not self._stopped.wait(0.1):
                    log.warning("handoff: %s", e)
                continue
            _, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
            if uid not in (0, os.geteuid()):
                log.warning("handoff: a process of user %d was turned away", uid)
                sock.close()
                continue
            with self._lock:
                old, self._peer = self._peer, sock
            if old is not None:
                with contextlib.suppress(OSError):
                    old.shutdown(socket.SHUT_RDWR)
            threading.Thread(target=self._serve, args=(sock,), name="rendezvous", daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        known: set[str] = set()
        log.info("the rendezvous connected")
        try:
            while self._next(sock, known):
                pass
        except OSError as e:
            log.warning("handoff: %s", e)
        finally:
            with self._lock:
                if self._peer is sock:
                    self._peer = None
            sock.close()

    def _next(self, sock: socket.socket, known: set[str]) -> bool:
        """Take one message; False at the end."""
        data, fds, _, _ = socket.recv_fds(sock, _MAX_MESSAGE, _MAX_FDS, socket.MSG_CMSG_CLOEXEC)
        try:
            if not data:
                return False
            # a message that is too long is cut, and then is no JSON; cut descriptors are too few
            answer = self._take(wire.unpack_json(data), fds, known)
        except ProtocolError as e:
            log.warning("handoff: %s", e)
            return True
        finally:
            for fd in fds:
                os.close(fd)
        if answer:
            sock.sendall(wire.pack_json(answer))
        return True

    def _take(self, message: dict[str, Any], fds: list[int], known: set[str]) -> dict[str, Any] | None:
        """Act on one message. The caller closes `fds`."""
        op = message.get("op")
        if op == "synced":
            self._sync(known)
            return None
        if op == "remove" and isinstance(uid := message.get("uid"), str):
            known.discard(uid)
            self._remove(uid)
            return None
        if op != "add" or len(fds) != 1:
            raise ProtocolError(f"cannot make sense of {op!r} with {len(fds)} sockets")
        identity = Identity.from_message(message)
        listener = _listening_socket(fds[0])
        try:
            self._add(identity, listener)
        except RefusedError as e:
            listener.close()
            log.info("pod %s/%s is not served: %s", identity.namespace, identity.pod, e)
            return {"op": "refused", "uid": identity.uid, "reason": str(e)}
        known.add(identity.uid)
        return None


def _listening_socket(fd: int) -> socket.socket:
    """A copy of `fd` as a socket. ProtocolError unless it listens for packets on a unix socket."""
    copy = os.dup(fd)
    try:
        sock = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise ProtocolError("not a socket") from None
    kind = sock.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE)
    listening = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    if (sock.family, kind, listening) != (socket.AF_UNIX, socket.SOCK_SEQPACKET, 1):
        sock.close()
        raise ProtocolError("not a listening socket of packets")
    return sock
