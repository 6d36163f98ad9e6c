"""Receives the pods' listening sockets from the node agent.

See docs/contribute/design/contracts.md, "Sidecar pod".
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import threading
from typing import Any, Protocol

from kvpool.errors import ProtocolError, RefusedError
from kvpool.protocol import wire
from kvpool_sidecar.system.unix_socket import listen_at
from kvpool_sidecar.tenancy.identity import Identity

__all__ = ["PodAdmission", "SocketHandoff"]

log = logging.getLogger(__name__)

_MAX_MESSAGE = 4096
_MAX_FDS = 4
_UCRED = struct.Struct("3i")


class PodAdmission(Protocol):
    """Receives the pods that the node agent reports."""

    def admit(self, identity: Identity, listener: socket.socket) -> None:
        """Serve a pod. RefusedError is reported to the node agent."""

    def add_streams(self, uid: str, listener: socket.socket) -> None:
        """Serve streams of peers' blocks to a pod. RefusedError if the pod is not served."""

    def remove(self, uid: str) -> None:
        """Stop serving a pod."""

    def retain(self, uids: set[str]) -> None:
        """Stop serving all other pods; called once the node agent has reported every pod of the node."""


class SocketHandoff:
    """Listens at `path` and serves one node agent, the latest. OSError if the path cannot be bound."""

    def __init__(self, path: str, pods: PodAdmission) -> None:
        self._pods = pods
        self._lock = threading.Lock()
        self._peer: socket.socket | None = None
        self._stopped = threading.Event()
        directory, _, name = os.path.abspath(path).rpartition("/")
        dir_fd = os.open(directory or "/", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            # the node agent is root without the right to override modes; its user is checked when it connects
            self._listener = listen_at(dir_fd, name, 0o666)
        finally:
            os.close(dir_fd)

    @property
    def connected(self) -> bool:
        """Whether a node agent is connected."""
        with self._lock:
            return self._peer is not None

    def status(self) -> dict[str, Any]:
        """Return whether the node agent is connected; without it, new pods get no socket."""
        return {"connected": self.connected}

    def start(self) -> None:
        threading.Thread(target=self._accept, name="handoff", daemon=True).start()

    def resync(self) -> None:
        """Make the node agent report all pods again, because the set of allowed pods has changed."""
        with self._lock:
            if self._peer is not None:
                with contextlib.suppress(OSError):
                    self._peer.shutdown(socket.SHUT_RDWR)

    def release_sockets(self) -> None:
        """Make the node agent close the pods' sockets, so that those of another sidecar replace them."""
        with self._lock:
            if self._peer is not None:
                with contextlib.suppress(OSError):
                    self._peer.sendall(wire.pack_json({"op": "rest"}))

    def stop(self) -> None:
        """Close the socket; the node agent keeps the pods' sockets for the next server."""
        self._stopped.set()
        with self._lock:
            open_sockets = [self._listener, self._peer]
        for sock in open_sockets:
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
                    log.warning("cannot accept the node agent's connection; retrying: %s", e)
                continue
            _, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
            if uid not in (0, os.geteuid()):
                log.warning(
                    "refused a connection for the node agent from user %d; only root and this user may connect",
                    uid,
                )
                sock.close()
                continue
            with self._lock:
                old, self._peer = self._peer, sock
            if old is not None:
                with contextlib.suppress(OSError):
                    old.shutdown(socket.SHUT_RDWR)
            threading.Thread(target=self._serve, args=(sock,), name="agent", daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        known: set[str] = set()
        log.info("the node agent is connected")
        try:
            while self._next(sock, known):
                pass
        except OSError as e:
            log.warning("the connection to the node agent failed: %s", e)
        finally:
            with self._lock:
                if self._peer is sock:
                    self._peer = None
            sock.close()

    def _next(self, sock: socket.socket, known: set[str]) -> bool:
        """Handle one message; return False at the end of the connection."""
        data, fds, _, _ = socket.recv_fds(sock, _MAX_MESSAGE, _MAX_FDS, socket.MSG_CMSG_CLOEXEC)
        try:
            if not data:
                return False
            # a truncated message is not valid JSON, and truncated descriptors are too few
            answer = self._apply(wire.unpack_json(data), fds, known)
        except ProtocolError as e:
            log.warning("ignored a message of the node agent: %s", e)
            return True
        finally:
            for fd in fds:
                os.close(fd)
        if answer:
            sock.sendall(wire.pack_json(answer))
        return True

    def _apply(self, message: dict[str, Any], fds: list[int], known: set[str]) -> dict[str, Any] | None:
        """Apply one message and return the reply, if any. The caller closes `fds`."""
        op = message.get("op")
        if op == "synced":
            self._pods.retain(known)
            return None
        if op == "remove" and isinstance(uid := message.get("uid"), str):
            known.discard(uid)
            self._pods.remove(uid)
            return None
        if op not in ("add", "streams") or len(fds) != 1:
            raise ProtocolError(f"unexpected operation {op!r} with {len(fds)} sockets")
        if op == "streams":
            self._add_streams(message.get("uid"), fds[0])
            return None
        identity = Identity.from_message(message)
        listener = _listening_socket(fds[0], socket.SOCK_SEQPACKET)
        try:
            self._pods.admit(identity, listener)
        except RefusedError as e:
            listener.close()
            log.info("pod %s/%s is not served and runs without the pool: %s", identity.namespace, identity.pod, e)
            return {"op": "refused", "uid": identity.uid, "reason": str(e)}
        known.add(identity.uid)
        return None

    def _add_streams(self, uid: Any, fd: int) -> None:
        listener = _listening_socket(fd, socket.SOCK_STREAM)
        try:
            self._pods.add_streams(str(uid), listener)
        except RefusedError as e:
            listener.close()
            log.debug("a stream socket is not served: %s", e)


def _listening_socket(fd: int, expected: socket.SocketKind) -> socket.socket:
    """Return a copy of `fd` as a socket. ProtocolError unless it is a listening unix socket of the expected kind."""
    copy = os.dup(fd)
    try:
        sock = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise ProtocolError("not a socket") from None
    kind = sock.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE)
    listening = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    if (sock.family, kind, listening) != (socket.AF_UNIX, expected, 1):
        sock.close()
        raise ProtocolError(f"not a listening {expected.name} unix socket")
    return sock
