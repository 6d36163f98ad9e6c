"""The asking side: memory that a device writes and a client reads through a descriptor.

A slot is an unnamed file in memory, mapped, resident and registered. Its seals refuse any new way to write it,
so a client can only read. A slot is used again for the same tenant only: a client that keeps a descriptor sees nothing
that its tenant could not have had anyway.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvpool_sidecar.peers.rdma.agent import NixlAgent

__all__ = ["Slot", "SlotPool"]

_GRAIN = 1 << 16
_GRAVE_S = 60.0  # nothing that was started so long ago still arrives
_F_SEAL_FUTURE_WRITE = 0x10  # linux/fcntl.h, since Linux 5.1; Python 3.11 has no name for it
_SEALS = _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Slot:
    """Room for one block file. `descriptor` is read-only."""

    def __init__(self, agent: NixlAgent, tenant: bytes, capacity: int) -> None:
        self.tenant = tenant
        self.capacity = capacity
        self._agent = agent
        writable = os.memfd_create("kvpool-rdma", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.descriptor = -1
        try:
            os.ftruncate(writable, capacity)
            self.memory = mmap.mmap(writable, capacity, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
            fcntl.fcntl(writable, fcntl.F_ADD_SEALS, _SEALS)
            self.descriptor = os.open(f"/proc/self/fd/{writable}", os.O_RDONLY | os.O_CLOEXEC)
            self.address, self._registration = agent.register(self.memory)
        except BaseException:
            if self.descriptor >= 0:
                os.close(self.descriptor)
            raise
        finally:
            os.close(writable)

    def close(self) -> None:
        """Give the memory back; who holds a descriptor keeps it alive."""
        registration: Any = self._registration
        self._agent.deregister(registration)
        os.close(self.descriptor)
        with contextlib.suppress(BufferError):  # an address was taken of it: the collector frees it
            self.memory.close()


class SlotPool:
    """At most `capacity` bytes of slots. Thread-safe."""

    def __init__(self, agent: NixlAgent, capacity: int) -> None:
        self._agent = agent
        self._capacity = capacity
        self._lock = threading.Lock()
        self._idle: list[Slot] = []  # least recently used first
        self._graves: list[tuple[float, Slot]] = []
        self.used_bytes = 0

    def acquire(self, tenant: bytes, size: int) -> Slot | None:
        """A slot of at least `size` bytes for a block of this tenant; None if there is no room now."""
        capacity = -(-size // _GRAIN) * _GRAIN
        doomed = []
        with self._lock:
            for at, slot in enumerate(self._idle):
                if slot.tenant == tenant and capacity <= slot.capacity <= 2 * capacity:
                    return self._idle.pop(at)
            while self._graves and self._graves[0][0] < time.monotonic():
                doomed.append(self._graves.pop(0)[1])
                self.used_bytes -= doomed[-1].capacity
            while self._idle and self.used_bytes + capacity > self._capacity:
                doomed.append(self._idle.pop(0))
                self.used_bytes -= doomed[-1].capacity
            has_room = self.used_bytes + capacity <= self._capacity
            self.used_bytes += capacity if has_room else 0
        for slot in doomed:
            slot.close()
        if not has_room:
            return None
        try:
            return Slot(self._agent, tenant, capacity)
        except BaseException:
            with self._lock:
                self.used_bytes -= capacity
            raise

    def release(self, slot: Slot) -> None:
        """To be used again, for its tenant."""
        with self._lock:
            self._idle.append(slot)

    def discard(self, slot: Slot) -> None:
        """Not to be used again: bytes may still arrive in it. Its room counts until that cannot happen any more."""
        with self._lock:
            self._graves.append((time.monotonic() + _GRAVE_S, slot))

    def close(self) -> None:
        """Give back what is idle."""
        with self._lock:
            idle, self._idle = self._idle, []
            self.used_bytes -= sum(slot.capacity for slot in idle)
        for slot in idle:
            slot.close()
