"""Every store keeps the contract."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from kvpool.config import CacheConfig, LocalTier
from kvpool_sidecar.storage.layout import block_path
from kvpool_sidecar.storage.local.store import open_local
from kvpool_sidecar.storage.memory import MemoryStore
from kvpool_sidecar.storage.shared.filesystem import FilesystemStore
from kvpool_sidecar.tenancy import limits as quota
from kvpool_testing.blocks import key, put
from kvpool_testing.drives import make_drive
from kvpool_testing.faulty_store import FaultyStore
from kvpool_testing.store import StoreContract

if TYPE_CHECKING:
    from pathlib import Path

CAPACITY = 32 << 20


def flip(path: Path, offset: int) -> None:
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.seek(offset)
        old = file.read(1)
        file.seek(offset)
        file.write(bytes([old[0] ^ 1]))


class FileContract(StoreContract):
    def path(self, store, key: bytes) -> Path:
        found = [p for p in self.directory.rglob(key.hex()) if "blocks" in p.parts]
        assert len(found) == 1
        return found[0]

    def corrupt(self, store, key, offset):
        flip(self.path(store, key), offset)

    def truncate(self, store, key, size):
        path = self.path(store, key)
        path.chmod(0o600)
        os.truncate(path, size)

    def vanish(self, store, key):
        self.path(store, key).unlink()


class TestRoot(FileContract):
    use_tmpfile = True

    @pytest.fixture
    def store(self, tmp_path):
        self.directory = tmp_path
        limits = quota.CapacityLimits(CAPACITY, 85, 75, 1000)
        root = make_drive("nvme", str(tmp_path / "r"), limits, pool_uid="u", use_tmpfile=self.use_tmpfile)
        root.scan()
        yield root
        root.close()


class TestRootWithoutUnnamedFiles(TestRoot):
    use_tmpfile = False

    def test_no_temporary_file_stays(self, store):
        put(store, 1)
        pending = store.begin(key(2), 1000)
        assert len(os.listdir(self.directory / "r" / "tmp")) == 1
        pending.abort()
        assert os.listdir(self.directory / "r" / "tmp") == []


class TestLocalOfThreeDrives(FileContract):
    @pytest.fixture
    def store(self, tmp_path):
        self.directory = tmp_path
        tiers = [LocalTier(f"nvme{n}", str(tmp_path / f"r{n}"), CAPACITY, reserve_free_percent=0) for n in range(3)]
        store = open_local(tiers, CacheConfig(), "u")
        for root in store.drives:
            root.scan()
        yield store
        store.close()


class TestShared(FileContract):
    detects_writers = False

    @pytest.fixture
    def store(self, tmp_path):
        self.directory = tmp_path
        store = FilesystemStore(str(tmp_path), pool_uid="u")
        yield store
        store.close()


class TestMemory(StoreContract):
    keeps_bad_blocks = False

    @pytest.fixture
    def store(self):
        store = MemoryStore(CAPACITY)
        yield store
        store.close()

    def corrupt(self, store, key, offset):
        data = bytearray(self.content(store, key))
        data[offset] ^= 1
        self.replace(store, key, data)

    def truncate(self, store, key, size):
        self.replace(store, key, self.content(store, key)[:size])

    def content(self, store, key):
        return os.pread(store._files[key], 1 << 20, 0)

    def replace(self, store, key, data):
        os.close(store._files[key])
        store._files[key] = os.memfd_create("changed")
        os.write(store._files[key], data)


class TestFaultyWithoutFaults(TestMemory):
    @pytest.fixture
    def store(self):
        store = FaultyStore(MemoryStore(CAPACITY))
        yield store
        store.close()

    def corrupt(self, store, key, offset):
        super().corrupt(store.inner, key, offset)

    def truncate(self, store, key, size):
        super().truncate(store.inner, key, size)


def test_names_are_hexadecimal_and_fanned_out():
    assert block_path(bytes(range(32))) == "00/01/" + bytes(range(32)).hex()
