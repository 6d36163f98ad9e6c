"""Selects RDMA or TCP. A fallback is never silent: there is always a reason to report."""

from __future__ import annotations

import importlib.util
import os
from typing import NamedTuple

__all__ = ["TransportChoice", "detect_rdma", "select_transport"]

_DEVICES = "/dev/infiniband"


class TransportChoice(NamedTuple):
    """`rdma`: try RDMA. `reason`: why not, empty otherwise."""

    rdma: bool
    reason: str = ""


def select_transport(protocol: str, *, package: bool, devices: bool) -> TransportChoice:
    """Select the transport. Pure. `protocol`: Auto, TCP or RDMA, as configured."""
    if protocol == "TCP":
        return TransportChoice(False, "the pool asks for TCP")
    if not devices:
        return TransportChoice(False, f"no RDMA device in this pod ({_DEVICES}/uverbs* is not there)")
    if not package:
        return TransportChoice(False, "this image has no NIXL: build it with RDMA=1")
    return TransportChoice(True)


def detect_rdma() -> tuple[bool, bool]:
    """Return whether the package and a device (or its replacement in tests) are available."""
    package = importlib.util.find_spec("nixl_cu12") is not None
    if os.environ.get("KVPOOL_UCX_TLS"):
        return package, True
    try:
        devices = any(name.startswith("uverbs") for name in os.listdir(_DEVICES))
    except OSError:
        devices = False
    return package, devices
