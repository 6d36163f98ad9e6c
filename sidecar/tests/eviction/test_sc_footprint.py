"""How many blocks a node may have, from the memory that its container may use."""

from __future__ import annotations

import sys

import pytest

from kvpool_sidecar import eviction as evict
from kvpool_sidecar.eviction import Entry
from kvpool_sidecar.eviction.footprint import BYTES_PER_BLOCK, block_limit
from kvpool_sidecar.system.memory import memory_limit
from kvpool_testing.blocks import key

GIB = 1 << 30


def test_the_limit_follows_the_memory_and_leaves_what_is_reserved():
    assert block_limit(8 * GIB, 0) == pytest.approx(4 * block_limit(2 * GIB, 0), rel=1e-4)
    assert block_limit(3 * GIB, GIB) == block_limit(2 * GIB, 0)
    assert block_limit(0, GIB) == 1 << 16


@pytest.mark.parametrize(("text", "limit"), [("1048576\n", 1 << 20), ("max\n", None), (str(1 << 62), None), ("", None)])
def test_the_memory_limit_is_that_of_the_container_else_of_the_machine(tmp_path, text, limit):
    (tmp_path / "max").write_text(text)
    machine = memory_limit(())
    assert machine > 1 << 20
    assert memory_limit((str(tmp_path / "none"), str(tmp_path / "max"))) == (limit or machine)


@pytest.mark.parametrize("policy", [*evict.POLICIES, "PerTenant"])
def test_a_block_takes_no_more_memory_than_the_limit_supposes(policy):
    def plain(_tenant: bytes = b"") -> evict.EvictionPolicy:
        return evict.create_policy("PrefixAware" if policy == "PerTenant" else policy, 1 << 40)

    table = evict.PerTenant(plain) if policy == "PerTenant" else plain()
    entry = Entry(2 << 20, 2 << 20, 1_700_000_000.5, tenant=b"t" * 16, created=1e9)
    before, count = sys.getallocatedblocks(), 150_000
    for n in range(count):
        table.add(key(n), entry)
    objects = sys.getallocatedblocks() - before
    assert len(table) == count
    assert objects < count  # only what the reuse model and the guard remember, whose size is bounded
    assert table.bytes_per_slot * 1.15 < BYTES_PER_BLOCK
