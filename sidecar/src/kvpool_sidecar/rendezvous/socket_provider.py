"""Passes the pods' listening sockets to the storage server, and again after a restart of either side."""

from __future__ import annotations

import errno
import json
import logging
import select
import socket
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvpool_sidecar.rendezvous.pods import TargetPod
    from kvpool_sidecar.rendezvous.socket_path import PlacedSocket

__all__ = ["SocketProvider"]

log = logging.getLogger(__name__)

_SEND_TIMEOUT_S = 5.0
_MAX_REPLY = 8192
_MAX_REPLIES = 1024  # of one call: a server that sends without end must not keep its pods from their sockets


class SocketProvider:
    """One connection to a storage server, which `dial` opens; `connect` tries once. Not thread-safe."""

    def __init__(self, dial: Callable[[], socket.socket]) -> None:
        self._dial = dial
        self._socket: socket.socket | None = None
        self._synced = False
        self._released = False

    @property
    def connected(self) -> bool:
        return self._socket is not None

    @property
    def is_released(self) -> bool:
        """Whether the server has requested to close the sockets, because another sidecar serves the pods."""
        return self._released

    def fileno(self) -> int:
        """Return the descriptor for polling; -1 while not connected."""
        return self._socket.fileno() if self._socket is not None else -1

    def connect(self, sockets: Mapping[str, tuple[TargetPod, PlacedSocket]]) -> bool:
        """Connect and pass all `sockets`; return False if the server is not available."""
        try:
            self._socket = self._dial()
        except OSError as e:
            if e.errno == errno.EPERM:
                log.warning("%s", e.strerror)
            return False
        self._socket.settimeout(_SEND_TIMEOUT_S)
        self._synced = self._released = False
        for pod, placed in sockets.values():
            self.add(pod, placed)
        if self.connected:
            log.info("connected to the storage server and passed %d sockets", len(sockets))
        return self.connected

    def add(self, pod: TargetPod, placed: PlacedSocket) -> None:
        """Pass the sockets of one pod."""
        self._send(pod.add_message(), [placed.listener.fileno()])
        self._send({"op": "streams", "uid": pod.uid}, [placed.streams.fileno()])

    def synced(self) -> None:
        """Report, once per connection, that all pods were passed, so that the server removes others."""
        if not self._synced:
            self._synced = True
            self._send({"op": "synced"})

    def remove(self, uid: str) -> None:
        """Report that a pod has ended."""
        self._send({"op": "remove", "uid": uid})

    def refusals(self) -> list[str]:
        """Return the uids that the server has refused since the last call; detects a lost connection."""
        refused: list[str] = []
        for _ in range(_MAX_REPLIES):
            if self._socket is None or not self._readable():
                break
            try:
                data = self._socket.recv(_MAX_REPLY)
            except OSError:
                data = b""
            if not data:
                self._disconnect()
                break
            message = _parse(data)
            if message.get("op") == "refused" and isinstance(message.get("uid"), str):
                refused.append(message["uid"])
            elif message.get("op") == "rest":
                self._released = True
        return refused

    def close(self) -> None:
        """Close the connection; the server keeps the sockets that it has."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _readable(self) -> bool:
        # not MSG_DONTWAIT: Python waits on a socket with a timeout anyway
        return self._socket is not None and bool(select.select([self._socket], [], [], 0)[0])

    def _send(self, message: dict[str, Any], fds: list[int] | None = None) -> None:
        if self._socket is None:
            return
        try:
            socket.send_fds(self._socket, [json.dumps(message).encode()], fds or [])
        except OSError as e:
            log.warning("cannot pass a socket to the storage server; reconnecting: %s", e)
            self._disconnect()

    def _disconnect(self) -> None:
        if self._socket is not None:
            log.info("the storage server disconnected; the sockets are kept for the next one")
            self._socket.close()
            self._socket = None


def _parse(data: bytes) -> dict[str, Any]:
    """Return a reply; empty if it is malformed, because the server is less trusted than this process."""
    try:
        message = json.loads(data)
    except (ValueError, RecursionError):
        message = None
    return message if isinstance(message, dict) else {}
