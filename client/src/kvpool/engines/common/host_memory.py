"""Views of an engine's host memory by address, only inside registered tensors.

An engine passes bare pointers; no value of a pointer may cause a read or write outside of the registered memory.
"""

from __future__ import annotations

import bisect
import ctypes
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["HostMemory", "tensor_bytes"]


def tensor_bytes(tensor: Any) -> memoryview:
    """Return all bytes of a contiguous tensor (torch's, or anything with its methods) in host memory, without a copy.

    The view keeps the tensor alive. ValueError for a tensor elsewhere, not contiguous, or empty.
    """
    if getattr(tensor.device, "type", str(tensor.device)) != "cpu" or not tensor.is_contiguous():
        raise ValueError("a tensor that is not contiguous in host memory")
    size = int(tensor.numel()) * int(tensor.element_size())
    if size <= 0:
        raise ValueError("an empty tensor")
    window = (ctypes.c_ubyte * size).from_address(int(tensor.data_ptr()))
    window.owner = tensor  # type: ignore[attr-defined]
    return memoryview(window).cast("B")


class HostMemory:
    """Registered memory, looked up by address. Immutable, thread-safe; keeps its tensors alive."""

    def __init__(self, tensors: Iterable[Any]) -> None:
        spans: dict[int, memoryview] = {}
        for tensor in tensors:
            view = tensor_bytes(tensor)
            start = int(tensor.data_ptr())
            if start not in spans or len(view) > len(spans[start]):
                spans[start] = view
        self._starts = sorted(spans)
        self._views = [spans[start] for start in self._starts]

    @property
    def size(self) -> int:
        """Bytes registered; 0 if there are none."""
        return sum(len(view) for view in self._views)

    def view(self, address: int, size: int) -> memoryview | None:
        """Return `size` writable bytes at `address`, or None unless all of them lie in one registered tensor."""
        place = bisect.bisect_right(self._starts, address) - 1
        if place < 0 or size <= 0:
            return None
        offset = address - self._starts[place]
        whole = self._views[place]
        return whole[offset : offset + size] if offset + size <= len(whole) else None
