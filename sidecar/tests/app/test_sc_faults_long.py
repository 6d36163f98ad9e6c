"""Faults that are worth more repetitions than one run of the suite has time for: `make faults` repeats them at length.

KVPOOL_KILLS (default 5; 200) sidecars killed during writes, KVPOOL_STEPS (default 60; 10,000) steps of the model.
"""

from __future__ import annotations

import os
import random
import subprocess
import threading
from typing import TYPE_CHECKING

import pytest
from sc_nodes import MIB, wait_for
from sc_raw import GoneError, block_id, payload

from kvpool import config
from kvpool.protocol import wire
from kvpool_testing.residue import exceeded, residue, stray_files, unsettled

if TYPE_CHECKING:
    from pathlib import Path

KILLS = int(os.environ.get("KVPOOL_KILLS", "5"))
STEPS = int(os.environ.get("KVPOOL_STEPS", "60"))
Commit = wire.CommitStatus


class Writers:
    """Three connections that store without a pause until the sidecar is gone."""

    def __init__(self, node, first: int) -> None:
        self.stored: set[int] = set()
        self.attempts = 0
        self._threads = [threading.Thread(target=self._run, args=(node, first + w * 10_000)) for w in range(3)]
        for thread in self._threads:
            thread.start()

    def _run(self, node, n: int) -> None:
        try:
            with node.connect() as raw:
                while True:
                    self.attempts += 1
                    if raw.put({block_id(n): payload(n, 30_000)}) == [Commit.STORED]:
                        self.stored.add(n)
                    n += 1
        except (GoneError, OSError, AssertionError):
            pass  # it was killed

    def join(self) -> None:
        for thread in self._threads:
            thread.join()


@pytest.mark.timeout(120 + 10 * KILLS)
def test_a_sidecar_killed_again_and_again_during_writes_keeps_whole_blocks_and_nothing_else(cluster):
    one = cluster(index=False)
    room = config.LocalTier("nvme", str(one.directory / "a" / "nvme"), 16 << 30, reserve_free_percent=0)
    node = one.node("a", local=(room,))  # nothing is evicted: what was stored must be there
    rng = random.Random(5)
    for number in range(KILLS):
        writers = Writers(node, number * 100_000)
        enough = rng.randrange(1, 60)
        wait_for(lambda w=writers, e=enough: w.attempts >= e, "writes are under way")
        node.kill()
        writers.join()
        node.start()
        node.ready()
        wait_for(lambda: unsettled(node.status()) == [], "scanned")
        assert stray_files(node.nvme) == []
        assert node.status()["events"].get("junk", 0) == 0
        assert residue(node.process.pid).deleted_files == 0
        names = sorted(writers.stored)
        with node.connect() as raw:
            for at in range(0, len(names), 64):
                some = names[at : at + 64]
                assert raw.get([block_id(n) for n in some]) == [payload(n, 30_000) for n in some]
            # every file that is there, told to a client as stored or not, is whole
            raw.ask(wire.Op.REPORT, wire.pack_json({"corrupt": [block_id(n).hex() for n in names[:64]]}))
        looked_at = f'kvpool_sidecar_reports_total{{result="checked"}} {len(names[:64])}'.encode()
        if names:
            wait_for(lambda line=looked_at: line in node.get("/metrics"), "the sidecar has looked at them")
        assert node.files("quarantine") == []
        assert exceeded(node.status()) == []


@pytest.mark.timeout(300 + STEPS)
def test_random_steps_over_real_sidecars_give_what_the_model_says_or_a_miss(cluster):
    """Put, get, lookup, kill, restart, damage, remove, flush, another capacity; two nodes, two tenants (fault 24)."""
    c = cluster(shared=True)
    nodes = [c.node(name) for name in "ab"]
    rng = random.Random(24)
    model: dict[tuple[str, int], bytes] = {}
    seen = {"hit": 0, "miss": 0}

    def put(node, tenant: str) -> None:
        first = rng.randrange(300)
        some = {n: payload(hash_of(tenant, n), rng.choice([1, 4096, 50_000])) for n in range(first, first + 3)}
        some = {n: model.get((tenant, n), data) for n, data in some.items()}
        model.update({(tenant, n): data for n, data in some.items()})
        with node.connect(tenant) as raw:
            statuses = raw.put({block_id(n): data for n, data in some.items()})
        assert set(statuses) <= {Commit.STORED, Commit.HAVE, -1}

    def get(node, tenant: str) -> None:
        numbers = sorted({rng.randrange(310) for _ in range(8)})
        with node.connect(tenant) as raw:
            raw.lookup([block_id(n) for n in numbers], flags=wire.Flag.EXHAUSTIVE)
            for n, entry in zip(numbers, raw.open([block_id(n) for n in numbers]), strict=True):
                data = raw.read(entry)
                seen["miss" if data is None else "hit"] += 1
                assert data is None or (tenant, n) in model, "a block that was never stored"
                assert data is None or data[4096:] == model[tenant, n]

    def restart(node, _tenant: str) -> None:
        node.kill() if rng.random() < 0.5 else node.stop()
        if rng.random() < 0.5:  # another capacity
            tier = config.LocalTier("nvme", str(node.nvme), rng.choice([2, 8, 64]) * MIB, reserve_free_percent=0)
            node.pool = config.loads(config.PoolConfig, config.dumps(node.pool))
            object.__setattr__(node.pool, "local", (tier,))
            node.write_config()
        node.start()
        node.ready()

    def remove(node, _tenant: str) -> None:
        for file in node.files():
            if rng.random() < 0.2:
                file.unlink(missing_ok=True)

    def flush(_node, _tenant: str) -> None:
        c.flush_index()

    steps = [put] * 40 + [get] * 50 + [restart] * 2 + [remove] * 2 + [flush]
    for _ in range(STEPS):
        rng.choice(steps)(rng.choice(nodes), rng.choice(["team-a", "team-b"]))
    assert seen["hit"] > STEPS // 10
    for node in nodes:
        wait_for(lambda node=node: unsettled(node.status()) == [], "quiet")
        assert stray_files(node.nvme) == []


def hash_of(tenant: str, n: int) -> int:
    return n * 2 + (tenant == "team-b")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small file system")
def test_a_drive_without_space_evicts_or_refuses_reads_on_and_recovers(cluster, tmp_path):
    """ENOSPC: somebody else fills the file system under the node (fault 6)."""
    c = cluster(index=False)
    mount = tmp_path / "small"
    mount.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=12m,mode=0700", "tmpfs", str(mount)], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip("mounting is not allowed here")
    try:
        tier = config.LocalTier("nvme", str(mount / "tier"), 64 * MIB, reserve_free_percent=0)
        node = c.node("a", local=(tier,))
        items = {block_id(n): payload(n, MIB) for n in range(4)}
        with node.connect() as raw:
            assert raw.put(items) == [Commit.STORED] * 4
            filler = mount / "filler"
            fill(filler)
            more = {block_id(n): payload(n, MIB) for n in range(100, 116)}
            outcomes = raw.put(more)
            assert set(outcomes) <= {
                Commit.STORED,
                Commit.REJECTED,
                -1,
            }  # evicted for it, refused, or no space to write it out
            kept = [data for data in raw.get([*items, *more]) if data is not None]
            assert kept
            assert set(kept) <= {*items.values(), *more.values()}
            filler.unlink()
            late = {block_id(n): payload(n, MIB) for n in range(200, 203)}
            wait_for(lambda: set(raw.put(late)) <= {Commit.STORED, Commit.HAVE}, "it stores again")
            assert raw.get(list(late)) == list(late.values())
        wait_for(lambda: unsettled(node.status()) == [], "quiet, and the drive is used")
        assert stray_files(mount / "tier") == []
        assert node.stop() == 0
    finally:
        for one in c.nodes:
            one.kill()
        subprocess.run(["umount", str(mount)], check=True)


def fill(file: Path) -> None:
    with file.open("wb", buffering=0) as f:
        try:
            while True:
                f.write(bytes(1 << 16))
        except OSError:
            pass
