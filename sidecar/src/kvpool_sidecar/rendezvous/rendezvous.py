"""Reconcile loop of one sidecar: its pool's pods -> sockets in their volumes -> server. No pod blocks another."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, NamedTuple

from kvpool_sidecar.rendezvous.socket_path import PlacedSocket, is_in_place, place_socket, remove_socket

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvpool_sidecar.rendezvous.pods import TargetPod
    from kvpool_sidecar.rendezvous.socket_provider import SocketProvider

__all__ = ["Rendezvous"]

log = logging.getLogger(__name__)

_CHECK_INTERVAL_S = 1.0
_RETRY_S = (0.5, 30.0)


class _Backoff(NamedTuple):
    """Retry delay of a pod whose directory returned an error."""

    wait_s: float
    until: float


class Rendezvous:
    """`step` does all due work and returns; it never raises because of a pod. Not thread-safe."""

    def __init__(
        self, pods_fd: int, pods: Callable[[], Mapping[str, TargetPod] | None], provider: SocketProvider
    ) -> None:
        self._pods_fd = pods_fd
        self._pods = pods
        self._provider = provider
        self._placed: dict[str, tuple[TargetPod, PlacedSocket]] = {}
        self._checked: dict[str, float] = {}
        self._backoffs: dict[str, _Backoff] = {}
        self._refused: set[str] = set()

    def step(self) -> None:
        """Reconcile every target pod once."""
        targets = self._pods()
        self._sync_server(targets or {})
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
        """Close the listening sockets, of which the server has copies; their files stay until others replace them."""
        for _, placed in self._placed.values():
            placed.close()
        self._provider.close()

    def _sync_server(self, targets: Mapping[str, TargetPod]) -> None:
        for uid in targets.keys() & set(self._provider.refusals()):
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

        The files stay until those of the other sidecar replace them.
        """
        for _, placed in self._placed.values():
            placed.close()
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
