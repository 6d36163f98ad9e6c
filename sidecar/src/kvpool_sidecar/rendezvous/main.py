"""Reconcile loop: target pods -> sockets in their volumes -> server. Pods are independent: no pod blocks another."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import time
from typing import TYPE_CHECKING, NamedTuple

from kvpool_sidecar.rendezvous.socket_path import PlacedSocket, is_in_place, place_socket, remove_socket
from kvpool_sidecar.rendezvous.socket_provider import SocketProvider

if TYPE_CHECKING:
    from kvpool_sidecar.rendezvous.pod_watch import PodWatcher
    from kvpool_sidecar.rendezvous.pods import TargetPod

__all__ = ["Rendezvous", "run"]

log = logging.getLogger(__name__)

_POLL_INTERVAL_S = 0.2
_CHECK_INTERVAL_S = 1.0
_RETRY_S = (0.5, 30.0)


class _Backoff(NamedTuple):
    """Retry delay of a pod whose directory returned an error."""

    wait_s: float
    until: float


class Rendezvous:
    """`step` does all due work and returns; it never raises because of a pod."""

    def __init__(self, pods_dir: str, watcher: PodWatcher, provider: SocketProvider) -> None:
        self._pods_fd = os.open(pods_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._watcher = watcher
        self._provider = provider
        self._placed: dict[str, tuple[TargetPod, PlacedSocket]] = {}
        self._checked: dict[str, float] = {}
        self._backoffs: dict[str, _Backoff] = {}
        self._refused: set[str] = set()

    def step(self) -> None:
        """Reconcile every target pod once."""
        self._sync_server()
        targets = self._watcher.pods()
        if targets is None:
            return
        for uid in set(self._placed) - set(targets):
            self._drop(uid, "the pod has ended")
        for uid in (self._backoffs.keys() | self._refused) - set(targets):
            self._backoffs.pop(uid, None)
            self._refused.discard(uid)
        for uid, pod in targets.items():
            if uid in self._refused:
                continue
            try:
                self._serve(pod)
            except OSError as e:
                self._back_off(pod, e)
            except Exception:
                log.exception("cannot serve pod %s/%s because of a defect; retrying", pod.namespace, pod.pod)
        if self._provider.connected:
            self._provider.synced()

    def fileno(self) -> int:
        """Return the descriptor of the server's connection, for polling; -1 while not connected."""
        return self._provider.fileno()

    def close(self) -> None:
        """Close the listening sockets; their files stay until the next rendezvous replaces them."""
        for _, placed in self._placed.values():
            placed.listener.close()
        os.close(self._pods_fd)

    def _sync_server(self) -> None:
        for uid in self._provider.refusals():
            self._refused.add(uid)
            self._drop(uid, "the server refused it")
        if self._provider.is_released and self._placed:
            self._release()
        if not self._provider.connected:
            self._refused.clear()  # the next server may have another configuration
            self._provider.connect(self._placed)

    def _serve(self, pod: TargetPod) -> None:
        now = time.monotonic()
        if pod.uid in self._placed:
            if now - self._checked.get(pod.uid, 0.0) < _CHECK_INTERVAL_S:
                return
            self._checked[pod.uid] = now
            state = is_in_place(self._pods_fd, pod.uid, self._placed[pod.uid][1])
            if state:
                return
            self._drop(pod.uid, "its volume is gone" if state is None else "its socket was removed")
        if not self._provider.connected or self._provider.is_released:
            return  # no server would accept there, but another sidecar of this node may
        if pod.uid in self._backoffs and now < self._backoffs[pod.uid].until:
            return
        placed = place_socket(self._pods_fd, pod.uid)
        if placed is None:
            return
        self._backoffs.pop(pod.uid, None)
        self._placed[pod.uid] = (pod, placed)
        self._checked[pod.uid] = now
        self._provider.add(pod, placed)
        log.info("created the socket of pod %s/%s", pod.namespace, pod.pod)

    def _release(self) -> None:
        """Close all sockets, because another sidecar of this node serves, so that clients connect to the new ones.

        The files stay until the other sidecar's rendezvous replaces them.
        """
        for _, placed in self._placed.values():
            placed.listener.close()
        log.info("another sidecar serves this node: closed %d sockets", len(self._placed))
        self._placed.clear()
        self._checked.clear()

    def _drop(self, uid: str, reason: str) -> None:
        entry = self._placed.pop(uid, None)
        self._checked.pop(uid, None)
        if entry is None:
            return
        pod, placed = entry
        self._provider.remove(uid)
        remove_socket(self._pods_fd, uid, placed)
        log.info("removed the socket of pod %s/%s: %s", pod.namespace, pod.pod, reason)

    def _back_off(self, pod: TargetPod, error: OSError) -> None:
        previous = self._backoffs.get(pod.uid)
        wait = min(previous.wait_s * 2, _RETRY_S[1]) if previous else _RETRY_S[0]
        if previous is None:
            log.warning(
                "cannot create the socket of pod %s/%s, it runs without the pool; retrying: %s",
                pod.namespace,
                pod.pod,
                error.strerror,
            )
        self._backoffs[pod.uid] = _Backoff(wait, time.monotonic() + wait)


def run(pods_dir: str, watcher: PodWatcher, rendezvous_socket: str) -> int:
    """Run until SIGTERM or SIGINT and return 0. OSError if `pods_dir` cannot be opened."""
    stop_r, stop_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    wake_r, wake_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def wake(fd: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(fd, b"w")

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: wake(stop_w))
    rendezvous = Rendezvous(pods_dir, watcher, SocketProvider(rendezvous_socket))
    watcher.on_change = lambda: wake(wake_w)
    watcher.start()
    while True:
        rendezvous.step()
        watched = [stop_r, wake_r, *([rendezvous.fileno()] if rendezvous.fileno() >= 0 else [])]
        ready, _, _ = select.select(watched, [], [], _POLL_INTERVAL_S)
        if stop_r in ready:
            rendezvous.close()
            return 0
        if wake_r in ready:
            os.read(wake_r, 4096)
