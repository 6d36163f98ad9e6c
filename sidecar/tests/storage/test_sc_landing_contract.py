"""The contract of a store for what pods write: through the landing zone to a drive."""

from __future__ import annotations

import os
import time

import pytest
from sc_landing import make_zone

from kvpool.errors import CorruptBlockError
from kvpool.protocol.block import HEADER_BYTES
from kvpool_sidecar.storage.base import WrapperStore
from kvpool_sidecar.storage.landing.ledger import Writer
from kvpool_sidecar.storage.landing.zone import Wanted
from kvpool_sidecar.storage.layout import block_path
from kvpool_testing.blocks import header, key, payload, put, read, write
from kvpool_testing.store import StoreContract

MIB = 1 << 20
POD = Writer(b"t" * 16, "pod")


class Landed(WrapperStore):
    """The local tier as a pod sees it."""

    def __init__(self, zone, local) -> None:
        super().__init__(local)
        self.zone = zone

    def begin_write(self, block_key, payload_len):
        (found,) = self.zone.begin(POD, [Wanted(block_key, payload_len)], time.monotonic() + 0.1)
        if isinstance(found, Exception):
            raise found
        assert found is not None
        return found


class TestLandingZone(StoreContract):
    @pytest.fixture
    def store(self, tmp_path):
        zone, local = make_zone(tmp_path / "r", capacity=32 * MIB, buffer=64 * MIB)
        self.path = tmp_path / "r" / "blocks"
        yield Landed(zone, local)
        zone.stop()
        local.close()

    def corrupt(self, store, key, offset):
        place = self.path / block_path(key)
        place.chmod(0o600)
        with place.open("r+b") as file:
            file.seek(offset)
            byte = file.read(1)[0]
            file.seek(offset)
            file.write(bytes([byte ^ 1]))

    def truncate(self, store, key, size):
        (self.path / block_path(key)).chmod(0o600)
        os.truncate(self.path / block_path(key), size)

    @pytest.mark.parametrize("change", [-1, 1, 5000])
    def test_a_file_of_another_length_is_not_published(self, store, change):
        """The kernel refuses a longer file; a shorter one is not published."""
        data = payload(1)
        pending = store.begin(key(1), len(data))
        write(pending, header(1, data), data)
        if change > 0:
            with pytest.raises(PermissionError):
                os.ftruncate(pending.writer, HEADER_BYTES + len(data) + change)
            pending.commit()
            return
        os.ftruncate(pending.writer, HEADER_BYTES + len(data) + change)
        with pytest.raises(CorruptBlockError):
            pending.commit()
        assert not store.contains(key(1))


@pytest.mark.parametrize("size", [4096, 5000, 2 * MIB - 4096, 2 * MIB, 5 * MIB + 1])
def test_the_file_of_a_drive_has_the_bytes_and_the_memory_is_free(tmp_path, size):
    zone, local = make_zone(tmp_path / "r", capacity=64 * MIB, buffer=64 * MIB)
    store = Landed(zone, local)
    put(store, 1, size)
    assert read(store, 1) == payload(1, size)
    assert (tmp_path / "r" / "blocks" / block_path(key(1))).stat().st_size == HEADER_BYTES + size
    assert (zone.status()["bytes"], zone.status()["places"]) == (0, 0)
    zone.stop()
    local.close()
