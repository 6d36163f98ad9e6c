"""Sends the sidecar of the node why an engine runs without the pool, so that the operator can show the sentence.

A thread per process sends it until the sidecar has it, and repeats it, because a new sidecar does not know it.
"""

from __future__ import annotations

import logging
import os
import threading
import time

from kvpool.engines.common.settings import client_config
from kvpool.errors import KVPoolError
from kvpool.protocol import wire
from kvpool.transport.connection import Connection

__all__ = ["MAX_PROBLEM", "report_without_pool", "send_problem"]

_log = logging.getLogger("kvpool")

MAX_PROBLEM = 200
_TIMEOUT_S = 2.0
_RETRY_S = 5.0  # the socket of a new pod appears after its start
_REPEAT_S = 300.0
_lock = threading.Lock()
_reporting: tuple[int, str] | None = None  # process and sentence


def report_without_pool(problem: str, engine: str) -> None:
    """Report in the background; the first sentence of a process wins. Never raises, and never blocks."""
    global _reporting
    with _lock:
        if _reporting is not None and _reporting[0] == os.getpid():
            return
        _reporting = (os.getpid(), problem)
    try:
        threading.Thread(target=_report, args=(problem, engine), name="kvpool-problem", daemon=True).start()
    except RuntimeError as e:  # no thread can be started
        _log.debug("kvpool: %s", e)


def send_problem(path: str, problem: str, engine: str) -> bool:
    """Send the sentence to the sidecar at `path`; False if it does not answer."""
    # a fingerprint of zeros is no engine's: it has no blocks
    try:
        connection = Connection(path, wire.ClientHello(bytes(32), engine), _TIMEOUT_S)
    except (KVPoolError, OSError):
        return False
    try:
        body = wire.pack_json({"problem": " ".join(problem.split())[:MAX_PROBLEM]})
        connection.request(wire.Op.REPORT, body, deadline=time.monotonic() + _TIMEOUT_S)
    except (KVPoolError, OSError):
        return False
    finally:
        connection.close()
    return True


def _report(problem: str, engine: str) -> None:
    path = client_config({}).socket
    while True:
        time.sleep(_REPEAT_S if send_problem(path, problem, engine) else _RETRY_S)
