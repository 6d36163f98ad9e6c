"""Listening sockets of the pods, and a thread per connection. Connections are bounded per pod and in total.

A pod has a socket for requests (SOCK_SEQPACKET) and one that its clients dial to read a peer's blocks (SOCK_STREAM).
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import threading
import time
from typing import TYPE_CHECKING, NamedTuple

from kvpool.errors import RefusedError

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from kvpool_sidecar.counters import Stats
    from kvpool_sidecar.serving.pod import Pod
    from kvpool_sidecar.serving.session import Session
    from kvpool_sidecar.serving.stream_exchange import StreamExchange

__all__ = ["PodListeners"]

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 4096  # more than the usual 110 pods of a node may open
_PAUSE_S = 0.05
_STOP_S = 2.0


class _Served(NamedTuple):
    """A pod and its listening sockets; `streams` is None while its node agent has passed none."""

    pod: Pod
    listener: socket.socket
    streams: socket.socket | None = None

    def sockets(self) -> list[socket.socket]:
        return [self.listener] if self.streams is None else [self.listener, self.streams]

    def close(self) -> None:
        for listener in self.sockets():
            listener.close()


class PodListeners:
    """Accepts connections; `new_session` creates the session of each, `exchange` serves the streams. Thread-safe."""

    def __init__(
        self, new_session: Callable[[socket.socket, Pod], Session], exchange: StreamExchange, stats: Stats
    ) -> None:
        self._new_session = new_session
        self._exchange = exchange
        self._stats = stats
        self._lock = threading.Lock()
        self._pods: dict[str, _Served] = {}
        self._streams = 0
        self._sessions: dict[Session, Pod] = {}
        self._stopped = threading.Event()
        self._wake_r, self._wake_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def start(self) -> None:
        self._exchange.start()
        threading.Thread(target=self._accept_all, name="accept", daemon=True).start()

    def add(self, pod: Pod, listener: socket.socket) -> None:
        """Serve a pod. A previous socket for requests is closed; the pod's connections continue."""
        listener.setblocking(False)
        with self._lock:
            known = self._pods.get(pod.identity.uid)
            # keep the counters of the pod: its limits hold across a restart of the node agent
            served = _Served(pod, listener) if known is None else known._replace(listener=listener)
            self._pods[pod.identity.uid] = served
        if known:
            known.listener.close()
        self._wake()

    def add_streams(self, uid: str, listener: socket.socket) -> None:
        """Serve streams to a pod. A previous stream socket is closed. RefusedError if the pod is not served."""
        listener.setblocking(False)
        with self._lock:
            known = self._pods.get(uid)
            if known is None:
                raise RefusedError("a stream socket of a pod that is not served")
            self._pods[uid] = known._replace(streams=listener)
            known.pod.has_stream_socket = True
        if known.streams is not None:
            known.streams.close()
        self._wake()

    def remove(self, uid: str) -> None:
        """Close the socket of a pod that has ended."""
        with self._lock:
            known = self._pods.pop(uid, None)
        if known:
            known.close()
            self._wake()

    def replace(self, uid: str, pod: Pod | None) -> None:
        """Serve the pod as `pod` from now on, or no longer; its connections end after their current request."""
        with self._lock:
            known = self._pods.get(uid)
            if known is None:
                return
            ending = [session for session, owner in self._sessions.items() if owner is known.pod]
            if pod is None:
                del self._pods[uid]
            else:
                pod.has_stream_socket = known.pod.has_stream_socket
                self._pods[uid] = known._replace(pod=pod)
        if pod is None:
            known.close()
        self._wake()
        for session in ending:
            session.stop()

    def pods(self) -> list[Pod]:
        """Return the pods that are served."""
        with self._lock:
            return [served.pod for served in self._pods.values()]

    def uids(self) -> set[str]:
        """Return the uids of the pods that are served."""
        with self._lock:
            return set(self._pods)

    @property
    def connections(self) -> int:
        with self._lock:
            return len(self._sessions)

    @property
    def connected_pods(self) -> int:
        """Number of pods with at least one connection."""
        with self._lock:
            return sum(1 for served in self._pods.values() if served.pod.connections)

    def stop(self, timeout_s: float = _STOP_S) -> None:
        """Stop accepting, let each connection finish its request, and wait at most `timeout_s` for that."""
        self._stopped.set()
        self._wake()
        with self._lock:
            pods = list(self._pods.values())
            sessions = list(self._sessions)
        for served in pods:
            served.close()
        for session in sessions:
            session.stop()
        deadline = time.monotonic() + timeout_s
        while self.connections and time.monotonic() < deadline:
            time.sleep(0.005)
        self._exchange.stop()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self._wake_w, b"w")

    def _accept_all(self) -> None:
        while not self._stopped.is_set():
            with self._lock:
                current = {
                    listener.fileno(): (served.pod, listener, listener is served.streams)
                    for served in self._pods.values()
                    for listener in served.sockets()
                }
            try:
                self._accept_until_changed(current)
            except Exception:
                log.exception("cannot accept client connections; retrying")
                self._stopped.wait(_PAUSE_S)

    def _accept_until_changed(self, current: dict[int, tuple[Pod, socket.socket, bool]]) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_r, selectors.EVENT_READ)
            for fd, served in current.items():
                if fd >= 0:
                    selector.register(fd, selectors.EVENT_READ, served)
            while not self._stopped.is_set():
                for key, _ in selector.select():
                    if key.data is None:
                        with contextlib.suppress(BlockingIOError):
                            os.read(self._wake_r, 4096)
                        return
                    self._accept(*key.data)

    def _accept(self, pod: Pod, listener: socket.socket, is_stream: bool) -> None:
        try:
            sock, _ = listener.accept()
        except BlockingIOError:
            return
        except OSError as e:
            log.debug("pod %s: %s", pod.identity.uid, e)
            self._stopped.wait(_PAUSE_S)  # no free descriptor, or the socket was just closed
            return
        sock.setblocking(True)
        if is_stream:
            self._accept_stream(pod, sock)
            return
        with self._lock:  # a pod that was replaced meanwhile gets no new connection
            known = self._pods.get(pod.identity.uid)
            session = None
            if known is not None and len(self._sessions) < MAX_CONNECTIONS and known.pod.enter():
                pod = known.pod
                session = self._new_session(sock, pod)
                self._sessions[session] = pod
        if session is None:
            self._stats.add("refused", "client-connections")
            sock.close()
            return
        threading.Thread(target=self._run, args=(session, pod), name="client", daemon=True).start()

    def _run(self, session: Session, pod: Pod) -> None:
        try:
            session.run()
        except Exception:
            log.exception("a client connection was closed because of a defect")
        finally:
            pod.leave()
            with self._lock:
                del self._sessions[session]

    def _accept_stream(self, pod: Pod, sock: socket.socket) -> None:
        with self._lock:
            known = self._pods.get(pod.identity.uid)
            is_admitted = known is not None and self._streams < MAX_CONNECTIONS and known.pod.enter_stream()
            if known is not None and is_admitted:
                pod = known.pod
                self._streams += 1
        if not is_admitted:
            self._stats.add("refused", "client-connections")
            sock.close()
            return
        threading.Thread(target=self._run_stream, args=(sock, pod), name="client-stream", daemon=True).start()

    def _run_stream(self, sock: socket.socket, pod: Pod) -> None:
        try:
            self._exchange.serve(sock, pod)
        except Exception:
            log.exception("a client's stream was closed because of a defect")
        finally:
            pod.leave_stream()
            with self._lock:
                self._streams -= 1
