"""Fixtures of the client's tests."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

import pytest
from cl_clock import Clock
from cl_fake_sidecar import FakeSidecar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[FakeSidecar]:
    """A scriptable stand-in for a sidecar, for faults that a real one does not have."""
    sidecar = FakeSidecar(tmp_path)
    sidecar.start()
    yield sidecar
    sidecar.stop()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def aligned() -> Callable[[int], memoryview]:
    """Make page-aligned buffers, like an engine's pinned memory."""

    def make(size: int) -> memoryview:
        return memoryview(mmap.mmap(-1, max(size, 4096)))[:size]

    return make
