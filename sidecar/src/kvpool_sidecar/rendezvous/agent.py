"""The node agent's process: one rendezvous for each sidecar of the node, so that no pool waits for another."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import select
import signal
from typing import TYPE_CHECKING

from kvpool_sidecar.rendezvous.rendezvous import Rendezvous
from kvpool_sidecar.rendezvous.sidecar_socket import dial_sidecar
from kvpool_sidecar.rendezvous.socket_provider import SocketProvider
from kvpool_sidecar.resilience.worker import PeriodicTask

if TYPE_CHECKING:
    from kvpool_sidecar.rendezvous.pod_watch import PodWatcher
    from kvpool_sidecar.rendezvous.pods import SidecarPod, TargetPod

__all__ = ["NodeAgent", "run"]

log = logging.getLogger(__name__)

_POLL_INTERVAL_S = 0.2
_MAX_SIDECARS = 128  # of all pools of a node, twice during a rollout
_STOP_S = 2.0


class NodeAgent:
    """`step` starts and ends the parts of sidecars that came and went. For one thread; `wake` is thread-safe."""

    def __init__(self, pods_dir: str, pods: PodWatcher[TargetPod], sidecars: PodWatcher[SidecarPod]) -> None:
        self._pods_fd = os.open(pods_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._pods = pods
        self._sidecars = sidecars
        self._parts: dict[SidecarPod, _SidecarPart] = {}

    def step(self) -> None:
        """Follow the list of sidecars."""
        sidecars = self._sidecars.pods()
        if sidecars is None:
            return
        wanted = sorted(sidecars.values())[:_MAX_SIDECARS]
        for gone in self._parts.keys() - set(wanted):
            log.info("the sidecar of pool %s has ended", gone.pool)
            self._parts.pop(gone).stop()
        for sidecar in wanted:
            if sidecar not in self._parts:
                log.info("serving the sidecar of pool %s", sidecar.pool)
                self._parts[sidecar] = part = _SidecarPart(self._pods_fd, sidecar, self._pods)
                part.start()

    def wake(self) -> None:
        """Make every part read its pods now."""
        for part in tuple(self._parts.values()):
            part.wake()

    def close(self) -> None:
        """End all parts; the sidecars keep the sockets that they have."""
        for part in self._parts.values():
            part.stop()
        self._parts.clear()
        os.close(self._pods_fd)


class _SidecarPart:
    """The rendezvous of one sidecar in a thread of its own."""

    def __init__(self, pods_fd: int, sidecar: SidecarPod, pods: PodWatcher[TargetPod]) -> None:
        self._sidecar = sidecar
        self._pods = pods
        dial = functools.partial(dial_sidecar, pods_fd, sidecar)
        self._rendezvous = Rendezvous(pods_fd, self._pods_of_pool, SocketProvider(dial))
        self._wake_r, self._wake_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._task = PeriodicTask(f"sidecar of {sidecar.pool}", self._step, 0.0)

    def start(self) -> None:
        self._task.start()

    def wake(self) -> None:
        with contextlib.suppress(OSError):  # full: it is awake
            os.write(self._wake_w, b"w")

    def stop(self) -> None:
        self.wake()
        self._task.stop(_STOP_S)
        self._rendezvous.close()
        os.close(self._wake_r)
        os.close(self._wake_w)

    def _pods_of_pool(self) -> dict[str, TargetPod] | None:
        pods = self._pods.pods()
        if pods is None:
            return None
        return {uid: pod for uid, pod in pods.items() if pod.pool == self._sidecar.pool}

    def _step(self) -> None:
        self._rendezvous.step()
        fd = self._rendezvous.fileno()
        ready, _, _ = select.select([self._wake_r, *([fd] if fd >= 0 else [])], [], [], _POLL_INTERVAL_S)
        if self._wake_r in ready:
            os.read(self._wake_r, 4096)


def run(pods_dir: str, pods: PodWatcher[TargetPod], sidecars: PodWatcher[SidecarPod]) -> int:
    """Run until SIGTERM or SIGINT and return 0. OSError if `pods_dir` cannot be opened."""
    stop_r, stop_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    wake_r, wake_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def write(fd: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(fd, b"w")

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: write(stop_w))
    agent = NodeAgent(pods_dir, pods, sidecars)
    for watcher in (pods, sidecars):
        watcher.on_change = functools.partial(write, wake_w)
        watcher.start()
    while True:
        agent.step()
        ready, _, _ = select.select([stop_r, wake_r], [], [], _POLL_INTERVAL_S)
        if stop_r in ready:
            agent.close()
            return 0
        if wake_r in ready:
            os.read(wake_r, 4096)
            agent.step()
            agent.wake()
