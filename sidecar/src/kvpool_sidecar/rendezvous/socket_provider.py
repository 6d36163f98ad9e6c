"""Hands pods' listening sockets to the storage server, and all of them again after either side has restarted."""

from __future__ import annotations

import json
import logging
import select
import socket
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvpool_sidecar.rendezvous.pods import TargetPod
    from kvpool_sidecar.rendezvous.socket_path import PlacedSocket

__all__ = ["SocketProvider"]

log = logging.getLogger(__name__)

_SEND_TIMEOUT_S = 5.0
_MAX_ANSWER = 8192


class SocketProvider:
    """One connection to the server; `connect` tries once. Not thread-safe."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._socket: socket.socket | None = None
        self._synced = False
        self._resting = False

    @property
    def connected(self) -> bool:
        return self._socket is not None

    @property
    def resting(self) -> bool:
        """True from when the server says that another sidecar of this node serves the pods, to the next server."""
        return self._resting

    def fileno(self) -> int:
        """To wait on; -1 while not connected."""
        return self._socket.fileno() if self._socket is not None else -1

    def connect(self, everything: Mapping[str, tuple[TargetPod, PlacedSocket]]) -> bool:
        """Connect and hand over `everything` that is in place. False if the server is not there."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.settimeout(_SEND_TIMEOUT_S)
        try:
            sock.connect(self._path)
        except OSError:
            sock.close()
            return False
        self._socket = sock
        self._synced = self._resting = False
        for pod, placed in everything.values():
            self.add(pod, placed)
        if self.connected:
            log.info("connected to the server, %d sockets handed over", len(everything))
        return self.connected

    def add(self, pod: TargetPod, placed: PlacedSocket) -> None:
        """Hand over one pod's socket."""
        self._send(pod.add_message(), [placed.listener.fileno()])

    def synced(self) -> None:
        """Say, once per connection, that all pods have been told: the server forgets the others."""
        if not self._synced:
            self._synced = True
            self._send({"op": "synced"})

    def remove(self, uid: str) -> None:
        """Say that a pod is gone."""
        self._send({"op": "remove", "uid": uid})

    def refusals(self) -> list[str]:
        """Uids that the server will not serve, as far as it has said so; notices when it is gone."""
        refused: list[str] = []
        while self._socket is not None and self._readable():
            try:
                data = self._socket.recv(_MAX_ANSWER)
            except OSError:
                data = b""
            if not data:
                self._lost()
                break
            message = json.loads(data)
            if message.get("op") == "refused" and isinstance(message.get("uid"), str):
                refused.append(message["uid"])
            elif message.get("op") == "rest":
                self._resting = True
        return refused

    def _readable(self) -> bool:
        # not MSG_DONTWAIT: on a socket with a timeout Python waits all the same
        return self._socket is not None and bool(select.select([self._socket], [], [], 0)[0])

    def _send(self, message: dict[str, Any], fds: list[int] | None = None) -> None:
        if self._socket is None:
            return
        try:
            socket.send_fds(self._socket, [json.dumps(message).encode()], fds or [])
        except OSError as e:
            log.warning("handing over: %s", e)
            self._lost()

    def _lost(self) -> None:
        if self._socket is not None:
            log.info("the server is gone; its sockets are kept for the next one")
            self._socket.close()
            self._socket = None
