"""Descriptors from the sidecar: no child of the engine inherits one, and closing one delays no caller."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from cl_fake_sidecar import FakeSidecar, block_id_of

from kvpool.client import Client
from kvpool.config import ClientConfig
from kvpool.protocol import wire
from kvpool.stats import Reason
from kvpool.transport import descriptor_closer
from kvpool.transport.connection import Connection
from kvpool.transport.descriptor_closer import DescriptorCloser

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import pytest

FP = b"f" * 32


def until(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.01)
    return False


def is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def test_a_child_of_the_engine_inherits_no_block(fake: FakeSidecar) -> None:
    name = block_id_of("x")
    fake.plant(name, FP, b"x" * 100)
    connection = Connection(fake.path, wire.ClientHello(FP, "", ""), 5)
    try:
        body = wire.pack_deadline(time.monotonic() + 5) + name
        reply = connection.request(wire.Op.OPEN, body, count=1, deadline=time.monotonic() + 5, max_descriptors=1)
        assert [os.get_inheritable(fd) for fd in reply.descriptors] == [False]
        descriptor_closer.close_later(reply.descriptors)
    finally:
        connection.close()


def test_descriptors_are_closed_in_the_background_and_none_is_dropped(tmp_path: Path) -> None:
    closer = DescriptorCloser("test-close", max_queued=2)
    path = tmp_path / "file"
    path.touch()
    descriptors = [os.open(path, os.O_RDONLY) for _ in range(50)]
    closer.close([-1, *descriptors])
    assert until(lambda: not any(map(is_open, descriptors)))
    assert (closer.queued, closer.has_room, closer.hung_s) == (0, True, 0.0)


def test_a_load_is_refused_while_too_many_descriptors_wait(fake: FakeSidecar, monkeypatch: pytest.MonkeyPatch) -> None:
    name = block_id_of("x")
    fake.plant(name, FP, b"x" * 100)
    client = Client(ClientConfig(socket=fake.path), fingerprint=FP)
    try:
        assert client.wait_connected(5)
        with monkeypatch.context() as patch:
            patch.setattr(DescriptorCloser, "has_room", False)
            assert client.get_into([name], [bytearray(100)])[0].reason == Reason.BUSY
        assert client.get_into([name], [bytearray(100)])[0].ok
    finally:
        client.close()
