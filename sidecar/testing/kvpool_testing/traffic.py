"""The reference mix against real sidecars: 92 % reads, 8 % writes, whole blocks, so many requests at once.

Source of the mix: published measurements of KV cache I/O, DESIGN section 2. A read looks a prompt up and then loads
blocks of what was found; what is missing is computed and stored, as an engine does, within the share of writes. Blocks
are named by number; their bytes follow from tenant and number, so any process can tell whether they are right.

An engine's payload is made by its accelerator and costs its process nothing. So payload is made and freed here by calls
of ctypes, which release the interpreter's lock: otherwise the traffic itself would make the client late.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import random
import threading
from typing import TYPE_CHECKING, NamedTuple

from kvpool.protocol import block, keys

if TYPE_CHECKING:
    from kvpool_testing.history import RecordingClient

__all__ = ["Mix", "Traffic", "block_id_of", "payload_into", "payload_of", "payload_sum_of"]

STRIDE = 1 << 16

_libc = ctypes.CDLL(None)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Mix(NamedTuple):
    """`prompt`: blocks in one lookup; `universe`: how many different blocks there are for each tenant."""

    block_bytes: int = 256 << 10
    universe: int = 200
    prompt: int = 8
    reads: float = 0.92
    pause_s: float = 0.0  # between a thread's requests, at most
    prefill_s: float = 0.0  # after a miss, at most: what was not found is computed, and does not ask again at once


def block_id_of(fingerprint: bytes, number: int) -> bytes:
    return keys.block_id(fingerprint, number.to_bytes(8, "little"))


def payload_into(buffer: memoryview, tenant: str, block_id: bytes) -> None:
    """Fill `buffer`: each line of 32 bytes tells the block and the tenant, each stride also its place."""
    seed = hashlib.sha256(tenant.encode() + b"\0" + block_id).digest()
    done = min(STRIDE, len(buffer))
    buffer[:done] = (bytes(8) + seed[8:] + seed * (STRIDE // len(seed) - 1))[:done]
    start = _address_of(buffer)
    while done < len(buffer):
        count = min(done, len(buffer) - done)
        ctypes.memmove(start + done, start, count)
        done += count
    for at in range(0, len(buffer), STRIDE):
        place = at.to_bytes(8, "little")[: len(buffer) - at]
        buffer[at : at + len(place)] = place


def payload_of(tenant: str, block_id: bytes, size: int) -> bytes:
    """The same as bytes."""
    data = bytearray(size)
    payload_into(memoryview(data), tenant, block_id)
    return bytes(data)


def payload_sum_of(tenant: str, block_id: bytes, size: int) -> bytes:
    """kvpool.protocol.block.checksum of the payload."""
    with _memory(size) as memory, memoryview(memory) as view:
        payload_into(view, tenant, block_id)
        checksum = block.checksum(view)
        _free(view)
        return checksum


def _address_of(buffer: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer)) if buffer else 0


def _memory(size: int) -> mmap.mmap:
    """Map memory that `_free` returns: pages of a shared mapping, the default of mmap, would stay."""
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _free(pages: memoryview) -> None:
    """Return whole pages to the system. Unlike mmap.madvise and munmap, it does not hold the interpreter's lock."""
    _libc.madvise(_address_of(pages), len(pages), mmap.MADV_DONTNEED)


class Traffic:
    """Threads that read and write until `stop`; `resize` changes how many of them there are."""

    def __init__(self, client: RecordingClient, fingerprint: bytes, mix: Mix, seed: int) -> None:
        self._client = client
        self._fingerprint = fingerprint
        self._mix = mix
        self._seed = seed
        self._threads: list[threading.Thread] = []
        self._wanted = 0
        self._stopped = threading.Event()

    def resize(self, depth: int) -> None:
        """So many requests at once from now on; those beyond end after the one they are at."""
        self._wanted = depth
        self._threads = [t for t in self._threads if t.is_alive()]
        running = {t.name for t in self._threads}
        for place in range(depth):
            name = f"traffic-{place}"
            if name not in running:
                thread = threading.Thread(target=self._run, args=(place,), name=name, daemon=True)
                self._threads.append(thread)
                thread.start()

    def stop(self, timeout_s: float = 60.0) -> bool:
        """End; False if a thread did not (a call has not returned)."""
        self._stopped.set()
        for thread in self._threads:
            thread.join(timeout_s)
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self, place: int) -> None:
        rng = random.Random(f"{self._seed}/{place}")  # noqa: S311
        with _memory(self._mix.block_bytes) as memory, memoryview(memory) as view:
            while not self._stopped.is_set() and place < self._wanted:
                hit = self._one(rng, view)
                _free(view)  # the buffers of all threads would not fit in memory
                pause = self._mix.pause_s if hit else self._mix.prefill_s
                if pause:
                    self._stopped.wait(pause * rng.random())

    def _one(self, rng: random.Random, view: memoryview) -> bool:
        """One request; whether it brought or stored something."""
        # an early block is in many prompts, a late one in few
        first = int(self._mix.universe * rng.random() ** 2)
        names = [block_id_of(self._fingerprint, (first + i) % self._mix.universe) for i in range(self._mix.prompt)]
        if rng.random() < self._mix.reads:
            tiers = self._client.lookup(names)
            found = next((i for i, tier in enumerate(tiers) if not tier), len(tiers))
            results = self._client.get_into([names[rng.randrange(max(found, 1))]], [view])
            return any(result.ok for result in results)
        name = rng.choice(names)
        payload_into(view, self._client.tenant, name)
        return any(result.ok for result in self._client.put_from([name], [view]))
