"""The loop: wanted pods -> sockets in place -> the server knows them. Each pod on its own: none stops another's."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import time
from typing import TYPE_CHECKING, NamedTuple

from kvpool_sidecar.rendezvous.socket_path import PlacedSocket, is_in_place, put_socket, take_away
from kvpool_sidecar.rendezvous.socket_provider import SocketProvider

if TYPE_CHECKING:
    from kvpool_sidecar.rendezvous.pod_watch import PodWatcher
    from kvpool_sidecar.rendezvous.pods import TargetPod

__all__ = ["Rendezvous", "run"]

log = logging.getLogger(__name__)

_POLL_S = 0.2
_CHECK_S = 1.0
_RETRY_S = (0.5, 30.0)


class _Trouble(NamedTuple):
    """A pod whose directory would not let us."""

    wait_s: float
    until: float


class Rendezvous:
    """`step` does all that is due and returns; it never raises for what a pod has done."""

    def __init__(self, pods_dir: str, source: PodWatcher, giver: SocketProvider) -> None:
        self._pods_fd = os.open(pods_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._source = source
        self._giver = giver
        self._placed: dict[str, tuple[TargetPod, PlacedSocket]] = {}
        self._checked: dict[str, float] = {}
        self._trouble: dict[str, _Trouble] = {}
        self._refused: set[str] = set()

    def step(self) -> None:
        """Look at every wanted pod once."""
        self._talk_to_server()
        wanted = self._source.pods()
        if wanted is None:
            return
        for uid in set(self._placed) - set(wanted):
            self._drop(uid, "the pod has ended")
        for uid in (self._trouble.keys() | self._refused) - set(wanted):
            self._trouble.pop(uid, None)
            self._refused.discard(uid)
        for uid, pod in wanted.items():
            if uid in self._refused:
                continue
            try:
                self._serve(pod)
            except OSError as e:
                self._note_trouble(pod, e)
            except Exception:
                log.exception("pod %s/%s", pod.namespace, pod.pod)
        if self._giver.connected:
            self._giver.synced()

    def fileno(self) -> int:
        """The server's connection, to wait on; -1 while there is none."""
        return self._giver.fileno()

    def close(self) -> None:
        """Let the sockets go. They stay where they are: the next rendezvous replaces them."""
        for _, placed in self._placed.values():
            placed.listener.close()
        os.close(self._pods_fd)

    def _talk_to_server(self) -> None:
        for uid in self._giver.refusals():
            self._refused.add(uid)
            self._drop(uid, "the server does not serve it")
        if self._giver.resting and self._placed:
            self._rest()
        if not self._giver.connected:
            self._refused.clear()  # the next server may have another configuration
            self._giver.connect(self._placed)

    def _serve(self, pod: TargetPod) -> None:
        now = time.monotonic()
        if pod.uid in self._placed:
            if now - self._checked.get(pod.uid, 0.0) < _CHECK_S:
                return
            self._checked[pod.uid] = now
            state = is_in_place(self._pods_fd, pod.uid, self._placed[pod.uid][1])
            if state:
                return
            self._drop(pod.uid, "its volume is gone" if state is None else "its socket was removed")
        if not self._giver.connected or self._giver.resting:
            return  # nobody would answer there, and another sidecar of this node may
        if pod.uid in self._trouble and now < self._trouble[pod.uid].until:
            return
        placed = put_socket(self._pods_fd, pod.uid)
        if placed is None:
            return
        self._trouble.pop(pod.uid, None)
        self._placed[pod.uid] = (pod, placed)
        self._checked[pod.uid] = now
        self._giver.add(pod, placed)
        log.info("socket for pod %s/%s", pod.namespace, pod.pod)

    def _rest(self) -> None:
        """Another sidecar of this node serves: let go of the sockets at once, so that clients look for the new ones.

        Their names stay, for the other one's rendezvous to replace.
        """
        for _, placed in self._placed.values():
            placed.listener.close()
        log.info("another sidecar serves this node: %d sockets let go", len(self._placed))
        self._placed.clear()
        self._checked.clear()

    def _drop(self, uid: str, why: str) -> None:
        found = self._placed.pop(uid, None)
        self._checked.pop(uid, None)
        if found is None:
            return
        pod, placed = found
        self._giver.remove(uid)
        take_away(self._pods_fd, uid, placed)
        log.info("no socket any more for pod %s/%s: %s", pod.namespace, pod.pod, why)

    def _note_trouble(self, pod: TargetPod, error: OSError) -> None:
        before = self._trouble.get(pod.uid)
        wait = min(before.wait_s * 2, _RETRY_S[1]) if before else _RETRY_S[0]
        if before is None:
            log.warning("pod %s/%s: no socket can be put into its volume: %s", pod.namespace, pod.pod, error.strerror)
        self._trouble[pod.uid] = _Trouble(wait, time.monotonic() + wait)


def run(pods_dir: str, source: PodWatcher, handoff: str) -> int:
    """Until SIGTERM or SIGINT; 0. OSError if `pods_dir` cannot be opened."""
    stop_r, stop_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    wake_r, wake_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def poke(fd: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(fd, b"w")

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: poke(stop_w))
    rendezvous = Rendezvous(pods_dir, source, SocketProvider(handoff))
    source.changed = lambda: poke(wake_w)
    source.start()
    while True:
        rendezvous.step()
        watched = [stop_r, wake_r, *([rendezvous.fileno()] if rendezvous.fileno() >= 0 else [])]
        ready, _, _ = select.select(watched, [], [], _POLL_S)
        if stop_r in ready:
            rendezvous.close()
            return 0
        if wake_r in ready:
            os.read(wake_r, 4096)
