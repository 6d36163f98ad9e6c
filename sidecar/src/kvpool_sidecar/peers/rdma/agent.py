"""NIXL with its UCX backend: registered memory, and reads from a peer's. The only module that knows NIXL.

The package is optional and takes its time to import, so it is imported when an agent is made. UCX reads its settings
from the environment: UCX_TLS is set to transports of RDMA devices before the agent is made, because its TCP transport
would listen without authentication. KVPOOL_UCX_TLS says otherwise, for tests on one machine.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
from typing import TYPE_CHECKING, Any

from kvpool.errors import DeadlineExceededError, PoolUnavailableError

if TYPE_CHECKING:
    import mmap

__all__ = ["MAX_METADATA", "NixlAgent", "Transfer", "wait_all"]

log = logging.getLogger(__name__)

MAX_METADATA = 1 << 16
_RDMA_TLS = "rc,ud"
_PROGRESS_PAUSE_US = 100
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.00005, 0.001


class Transfer:
    """One read under way."""

    def __init__(self, agent: NixlAgent, handle: Any) -> None:
        self._agent = agent
        self._handle = handle
        self._over = False

    def poll(self) -> bool:
        """True once the bytes are here. PoolUnavailableError if the read failed."""
        if not self._over:
            state = self._agent.call("check_xfer_state", self._handle)
            if state == "PROC":
                return False
            self._over = True
            self._release()
            if state != "DONE":
                raise PoolUnavailableError("the read failed", where="rdma")
        return True

    def abandon(self) -> None:
        """Stop it if that can be done. Bytes may still arrive."""
        if not self._over:
            self._over = True
            self._release()

    def _release(self) -> None:
        try:
            self._agent.call("release_xfer_handle", self._handle)
        except PoolUnavailableError as e:
            log.debug("%s", e)


class NixlAgent:
    """This process's end. Thread-safe. PoolUnavailableError if the package or the backend is not available."""

    def __init__(self, name: str) -> None:
        os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
        os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
        os.environ["UCX_TLS"] = os.environ.get("KVPOOL_UCX_TLS") or _RDMA_TLS
        try:
            from nixl_cu12 import _api as api
        except ImportError as e:
            raise PoolUnavailableError(f"the package nixl-cu12 is not installed ({e})", where="rdma") from None
        try:
            _let_progress_rest(api)
            self._nixl: Any = api.nixl_agent(name, api.nixl_agent_config(backends=["UCX"]))
        except Exception as e:  # the bindings raise types of their own
            raise PoolUnavailableError(f"UCX finds no usable device ({type(e).__name__})", where="rdma") from None
        _end_before_destructors()
        self._lock = threading.Lock()

    def call(self, method: str, *args: Any) -> Any:
        """One call at a time; what the bindings raise becomes PoolUnavailableError."""
        with self._lock:
            try:
                return getattr(self._nixl, method)(*args)
            except Exception as e:
                raise PoolUnavailableError(f"{method}: {type(e).__name__}", where="rdma") from None

    def register(self, memory: mmap.mmap) -> tuple[int, Any]:
        """Make `memory` (writable) known to the devices; its address and a registration for `deregister`."""
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        return address, self.call("register_memory", [(address, len(memory), 0, "")], "DRAM")

    def deregister(self, registration: Any) -> None:
        """No device may touch it any more."""
        self.call("deregister_memory", registration)

    def metadata(self) -> bytes:
        """What a peer needs to read from what is registered now."""
        found: bytes = self.call("get_agent_metadata")
        return found

    def add_peer(self, metadata: bytes) -> str:
        """The name under which reads find the peer that said this of itself over its proven connection."""
        name = self.call("add_remote_agent", metadata)
        return name.decode() if isinstance(name, bytes) else str(name)

    def remove_peer(self, name: str) -> None:
        """That peer is gone."""
        try:
            self.call("remove_remote_agent", name)
        except PoolUnavailableError as e:
            log.debug("%s", e)

    def read(self, peer: str, local: int, remote: int, count: int) -> Transfer:
        """Start to read `count` bytes from `remote` of `peer` into `local`, both addresses of registered memory."""
        with self._lock:
            try:
                here = self._nixl.get_xfer_descs([(local, count, 0)], "DRAM")
                there = self._nixl.get_xfer_descs([(remote, count, 0)], "DRAM")
                handle = self._nixl.initialize_xfer("READ", here, there, peer)
                state = self._nixl.transfer(handle)
            except Exception as e:
                raise PoolUnavailableError(f"read: {type(e).__name__}", where="rdma") from None
        if state == "ERR":
            raise PoolUnavailableError("the read failed", where="rdma")
        return Transfer(self, handle)


def _let_progress_rest(api: Any) -> None:
    """NIXL's Python interface (1.5.1) has the thread that moves transfers along spin: an idle agent took most of a
    processor. With a pause between looks it takes 2 %, and reads are no slower (loopback, 8 MiB: 8 to 14 ms).
    """
    config = api.nixlBind.nixlAgentConfig
    if config.__name__ == "RestingConfig":
        return

    class RestingConfig(config):  # type: ignore[misc,valid-type]
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, _PROGRESS_PAUSE_US if name == "pthrDelay" else value)

    api.nixlBind.nixlAgentConfig = RestingConfig


def _end_before_destructors() -> None:
    """Libraries in the wheel crash in their destructors when a process ends (libnl-route, nixl-cu12 1.5.1, with nothing
    but an agent made), which would turn every exit code into that of the crash: end just before them, with the code.
    """
    libc = ctypes.CDLL(None)
    libc.on_exit(libc._exit, None)  # after all that Python does at exit; the loader's part comes last


def wait_all(transfers: list[Transfer], deadline: float) -> None:
    """Until all are done. DeadlineExceededError at `deadline` (monotonic), PoolUnavailableError if one fails."""
    pause = _FIRST_PAUSE_S
    waiting = list(transfers)
    while waiting := [transfer for transfer in waiting if not transfer.poll()]:
        if time.monotonic() > deadline:
            raise DeadlineExceededError("a read is late", where="rdma")
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)
