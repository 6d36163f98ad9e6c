"""What every Store must do. Subclass StoreContract and give it a fixture `store`: empty, with room for 16 MB."""

from __future__ import annotations

import abc
import dataclasses
import os
import threading
from typing import TYPE_CHECKING

import pytest

from kvpool.errors import CorruptBlockError, RefusedError, TierFullError
from kvpool.protocol import block
from kvpool_sidecar.blocks.file import Expect
from kvpool_sidecar.storage.base import CommitOutcome
from kvpool_testing.blocks import TAG, block_id, header, key, payload, put, read, write

if TYPE_CHECKING:
    from kvpool_sidecar.storage.base import Store

__all__ = ["StoreContract"]


class StoreContract(abc.ABC):
    """Tests. `corrupt` must change a stored block's file without going through the store."""

    # a network file system has no leases: there only the sidecar itself writes, and closes before it commits
    detects_writers = True
    # a store that verifies what it hands out has a miss where others hand out a bad block, which its reader finds
    verifies = False
    keeps_bad_blocks = True

    @abc.abstractmethod
    def corrupt(self, store: Store, key: bytes, offset: int) -> None:
        """Flip a bit of the byte at `offset` of the block's file, behind the store's back."""

    @abc.abstractmethod
    def truncate(self, store: Store, key: bytes, size: int) -> None:
        """Cut the block's file to `size`, behind the store's back."""

    def test_what_was_stored_comes_back(self, store: Store) -> None:
        assert not store.contains(key(1))
        assert read(store, 1) is None
        assert put(store, 1) == CommitOutcome.STORED
        assert store.contains(key(1))
        assert read(store, 1) == payload(1)

    @pytest.mark.parametrize("size", [1, 4095, 4096, 4097, 300_001])
    def test_any_length_comes_back(self, store: Store, size: int) -> None:
        assert put(store, 1, size) == CommitOutcome.STORED
        assert read(store, 1) == payload(1, size)

    def test_a_block_that_is_there_is_not_begun_again(self, store: Store) -> None:
        put(store, 1)
        assert store.begin(key(1), 20_000) is None

    def test_the_second_of_two_writers_is_told_that_it_is_there(self, store: Store) -> None:
        data = payload(1)
        first, second = store.begin(key(1), len(data)), store.begin(key(1), len(data))
        assert first is not None
        assert second is not None
        for pending in (first, second):
            write(pending, header(1, data), data)
        assert first.commit() == CommitOutcome.STORED
        assert second.commit() == CommitOutcome.ALREADY_PRESENT
        assert read(store, 1) == data

    def test_nothing_is_seen_before_commit_nor_after_abort(self, store: Store) -> None:
        pending = store.begin(key(1), 20_000)
        assert pending is not None
        write(pending, header(1, payload(1)), payload(1))
        assert not store.contains(key(1))
        assert store.open(key(1)) is None
        assert pending.abort()
        assert not pending.abort()
        assert not store.contains(key(1))
        with pytest.raises(RefusedError):
            pending.commit()

    def test_an_aborted_file_gives_its_space_back_although_somebody_holds_it(self, store: Store) -> None:
        pending = store.begin(key(1), 200_000)
        assert pending is not None
        kept = os.dup(pending.writer)
        os.pwrite(kept, b"x" * 200_000, 0)
        pending.abort()
        assert os.fstat(kept).st_size == 0
        os.close(kept)

    def test_a_writer_that_keeps_its_descriptor_cannot_change_what_is_published(self, store: Store) -> None:
        if not self.detects_writers:
            pytest.skip("no client holds a write descriptor of this store: only the sidecar writes to it")
        data = payload(1)
        pending = store.begin(key(1), len(data))
        assert pending is not None
        write(pending, header(1, data), data)
        kept = os.dup(pending.writer)
        try:
            pending.commit()
        except RefusedError:
            assert not store.contains(key(1))
        else:  # published: then the descriptor must be worth nothing
            with pytest.raises(PermissionError):
                os.pwrite(kept, b"x", block.HEADER_BYTES)
        finally:
            os.close(kept)
        assert read(store, 1) in (None, data)

    @pytest.mark.parametrize("wrong", ["key", "block_id", "tag", "length", "garbage"])
    def test_only_the_block_that_was_announced_is_published(self, store: Store, wrong: str) -> None:
        data = payload(1)
        head = header(1, data)
        if wrong == "key":
            head = dataclasses.replace(head, block_key=key(2))
        elif wrong == "block_id":
            head = dataclasses.replace(head, block_id=block_id(2))
        elif wrong == "tag":
            head = dataclasses.replace(head, tenant_tag=b"u" * 16)
        elif wrong == "length":
            head = dataclasses.replace(head, payload_len=len(data) - 1, stored_len=len(data) - 1)
        pending = store.begin(key(1), len(data))
        assert pending is not None
        write(pending, head, data)
        if wrong == "garbage":
            os.pwrite(pending.writer, b"?", 100)
        with pytest.raises(CorruptBlockError):
            pending.commit(Expect(block_id(1), TAG))
        assert not store.contains(key(1))

    @pytest.mark.parametrize("change", [-1, 1, 5000])
    def test_a_file_of_another_length_is_not_published(self, store: Store, change: int) -> None:
        data = payload(1)
        pending = store.begin(key(1), len(data))
        assert pending is not None
        write(pending, header(1, data), data)
        os.ftruncate(pending.writer, block.HEADER_BYTES + len(data) + change)
        with pytest.raises(CorruptBlockError):
            pending.commit()
        assert not store.contains(key(1))

    def test_the_store_fills_in_the_checksum_on_request(self, store: Store) -> None:
        data = payload(1, 3_000_000)
        pending = store.begin(key(1), len(data))
        assert pending is not None
        write(pending, dataclasses.replace(header(1, data), payload_sum=bytes(16)), data)
        assert pending.commit(Expect(block_id(1), TAG), fill_checksum=True) == CommitOutcome.STORED
        assert read(store, 1) == data

    def test_what_is_handed_out_cannot_be_written(self, store: Store) -> None:
        put(store, 1)
        found = store.open(key(1))
        assert found is not None
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.write(found.fd, b"x")
        assert not os.get_inheritable(found.fd)
        os.close(found.fd)

    @pytest.mark.parametrize("offset", [0, 40, 4095, 4096, 24_095])
    def test_a_flipped_bit_is_found_and_the_block_quarantined(self, store: Store, offset: int) -> None:
        put(store, 1)
        assert store.verify(key(1))
        self.corrupt(store, key(1), offset)
        if self.verifies:
            assert read(store, 1) is None
        else:
            with pytest.raises(CorruptBlockError):
                read(store, 1)
        assert not store.verify(key(1))
        assert not store.contains(key(1))
        assert read(store, 1) is None
        assert put(store, 1) == CommitOutcome.STORED
        assert read(store, 1) == payload(1)

    @pytest.mark.parametrize("size", [0, 100, 4096, 4097, 24_095])
    def test_a_truncated_block_is_a_miss_or_found_corrupt(self, store: Store, size: int) -> None:
        put(store, 1)
        self.truncate(store, key(1), size)
        assert not store.verify(key(1))
        assert store.open(key(1)) is None

    def test_a_removed_block_is_gone_and_open_descriptors_live_on(self, store: Store) -> None:
        put(store, 1)
        found = store.open(key(1))
        assert found is not None
        assert store.delete(key(1))
        assert not store.delete(key(1))
        assert not store.contains(key(1))
        assert os.pread(found.fd, found.payload_len, block.HEADER_BYTES) == payload(1)
        os.close(found.fd)

    def test_a_block_says_of_itself_what_its_writer_said(self, store: Store) -> None:
        put(store, 1)
        said = store.header(key(1))
        assert said is not None
        assert (said.block_key, said.block_id, said.tenant_tag, said.payload_len) == (key(1), block_id(1), TAG, 20_000)
        assert store.header(key(2)) is None
        self.corrupt(store, key(1), 100)
        with pytest.raises(CorruptBlockError):
            store.header(key(1))

    def test_purged_blocks_are_gone_and_counted(self, store: Store) -> None:
        for n in range(3):
            put(store, n)
        assert store.purge([key(0), key(1), key(9)]) == 2
        assert store.purge([key(0)]) == 0
        assert [store.contains(key(n)) for n in range(3)] == [False, False, True]
        assert read(store, 2) == payload(2)

    def test_bad_blocks_that_were_kept_go_by_what_they_say(self, store: Store) -> None:
        if not self.keeps_bad_blocks:
            pytest.skip("this store deletes corrupt blocks; it has no quarantine to purge")
        for n in (1, 2):
            put(store, n)
            store.quarantine(key(n))
        asked: list[bytes] = []

        def doomed(said: block.BlockHeader | None) -> bool:
            assert said is not None
            asked.append(said.block_key)
            return said.block_key == key(1)

        assert store.purge_quarantine(doomed) == 1
        assert store.purge_quarantine(doomed) == 0
        assert asked.count(key(2)) == 2

    def test_a_block_that_vanished_is_a_miss_and_can_be_stored_again(self, store: Store) -> None:
        put(store, 1)
        self.vanish(store, key(1))
        assert store.open(key(1)) is None
        assert not store.contains(key(1))
        assert put(store, 1) == CommitOutcome.STORED

    def vanish(self, store: Store, key: bytes) -> None:
        """Take the block away behind the store's back; override where `remove` keeps no table to mislead."""
        store.delete(key)

    def test_keys_tells_every_block_and_its_length(self, store: Store) -> None:
        for n in range(5):
            put(store, n, 10_000 + n)
        assert dict(store.keys()) == {key(n): 10_000 + n for n in range(5)}

    def test_a_block_larger_than_the_store_is_refused(self, store: Store) -> None:
        capacity = store.usage().capacity_bytes
        if not capacity:
            pytest.skip("this store has no capacity limit: the bucket or file system sets it")
        with pytest.raises(TierFullError):
            store.begin(key(1), capacity + 1)

    def test_many_threads_see_whole_blocks_only(self, store: Store) -> None:
        failures: list[str] = []

        def work(worker: int) -> None:
            for n in range(12):
                if n % 3 == worker % 3 and not store.contains(key(n)):
                    pending = store.begin(key(n), 20_000)
                    if pending is not None:
                        write(pending, header(n, payload(n)), payload(n))
                        pending.commit()
                data = read(store, n)
                if data not in (None, payload(n)):
                    failures.append(f"worker {worker} read something else for block {n}")

        threads = [threading.Thread(target=work, args=(w,)) for w in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        assert set(dict(store.keys())) == {key(n) for n in range(12)}
