"""Spoiled block files on the own drive, on a peer's drive and on the shared tier: a load is right or a miss.

KVPOOL_SPOILED (default 90; 10,000 in `make faults`) blocks over the three tiers.
"""

from __future__ import annotations

import os
import random
import shutil
import time
from typing import TYPE_CHECKING

import pytest
from sc_fault_blocks import wait_copied
from sc_nodes import wait_for

from kvpool.client import Client
from kvpool.config import ClientConfig
from kvpool.protocol import keys

if TYPE_CHECKING:
    from pathlib import Path

    from kvpool.results import LoadResult

SPOILED = int(os.environ.get("KVPOOL_SPOILED", "90"))
ROUND = 30
SIZE = 40_000
FINGERPRINT = keys.fingerprint({"model": "spoiled"})


def block_id(n: int) -> bytes:
    return keys.block_id(FINGERPRINT, n.to_bytes(8, "little"))


def payload(n: int) -> bytes:
    return random.Random(n).randbytes(SIZE)


def flip(file: Path, _other: Path, rng: random.Random) -> None:
    with file.open("r+b") as f:
        at = rng.randrange(file.stat().st_size)
        f.seek(at)
        old = f.read(1)[0]
        f.seek(at)
        f.write(bytes([old ^ (1 << rng.randrange(8))]))


def truncate(file: Path, _other: Path, rng: random.Random) -> None:
    os.truncate(file, rng.randrange(file.stat().st_size))


def extend(file: Path, _other: Path, rng: random.Random) -> None:
    with file.open("ab") as f:
        f.write(rng.randbytes(rng.randrange(1, 9000)))


def zero(file: Path, _other: Path, rng: random.Random) -> None:
    with file.open("r+b") as f:
        f.seek(rng.randrange(4096, file.stat().st_size - 4096))
        f.write(bytes(4096))


def replace(file: Path, other: Path, _rng: random.Random) -> None:
    """The whole file of another block, which is right in itself."""
    shutil.copyfile(other, file)


def header_of_another(file: Path, other: Path, _rng: random.Random) -> None:
    with file.open("r+b") as f, other.open("rb") as o:
        f.write(o.read(4096))


def payload_of_another(file: Path, other: Path, _rng: random.Random) -> None:
    with file.open("r+b") as f, other.open("rb") as o:
        f.seek(4096)
        o.seek(4096)
        f.write(o.read())


SPOILS = (flip, flip, truncate, extend, zero, replace, header_of_another, payload_of_another)


def blocks_below(node) -> set[Path]:
    return set(node.files())


@pytest.mark.timeout(120 + SPOILED)
@pytest.mark.parametrize("tier", ["local", "peer", "shared"])
def test_a_spoiled_block_is_a_miss_or_has_the_right_bytes(cluster, tier):
    c = cluster(index=tier == "peer", shared=tier == "shared")
    a = c.node("a")
    b = a if tier == "local" else c.node("b")
    rng = random.Random(tier)
    made = {node: Client(ClientConfig(socket=str(node.sockets["team-a"])), fingerprint=FINGERPRINT) for node in {a, b}}
    outcome: dict[str, int] = {}
    try:
        for client in made.values():
            assert client.wait_connected(30)
        for first in range(0, SPOILED // 3, ROUND):
            one_round(range(first, first + ROUND), tier, a, b, made, rng, outcome)
    finally:
        for client in made.values():
            client.close()
    print(tier, outcome)
    assert outcome["control"] == len(range(0, SPOILED // 3, ROUND)) * ROUND // 3
    assert outcome.get("miss", 0) > outcome.get("right", 0), "most of the files were spoiled where it matters"


def one_round(numbers: range, tier: str, a, b, made: dict, rng: random.Random, outcome: dict[str, int]) -> None:
    """Store, spoil two of three, load all on the node of the tier."""
    before = shared_files(a) if tier == "shared" else blocks_below(a)
    order = {}
    for n in numbers:  # one by one, so that each file is known
        wait_for(lambda n=n: made[a].put_from([block_id(n)], [payload(n)])[0].ok, f"block {n} is stored", 60)
        if tier == "shared":
            wait_copied(a)
        now = shared_files(a) if tier == "shared" else blocks_below(a)
        (order[n],) = now - before
        before = now
    if tier == "peer":
        a.wait_announced()
        wait_for(lambda: all(made[b].lookup([block_id(n) for n in numbers])), "the peer's blocks are found")
    spoiled = {n for n in numbers if n % 3}
    control = [order[n] for n in numbers if not n % 3]
    for n in spoiled:
        order[n].chmod(0o600)
        rng.choice(SPOILS)(order[n], rng.choice(control), rng)
    for n in numbers:
        view = memoryview(bytearray(SIZE))

        def load(n: int = n, view: memoryview = view) -> LoadResult:
            return made[b].get_into([block_id(n)], [view], time.monotonic() + 30)[0]

        result = load() if n in spoiled else wait_for(lambda load=load: (r := load()).ok and r, f"block {n}", 60)
        if result.ok:
            assert bytes(view) == payload(n), f"{tier}: block {n} has wrong bytes"
            assert result.tier.name.lower() == tier
        name = "control" if result.ok and n not in spoiled else "right" if result.ok else "miss"
        outcome[name] = outcome.get(name, 0) + 1


def shared_files(node) -> set[Path]:
    below: Path = node.cluster.shared
    return {f for f in below.rglob("*") if f.is_file() and f.stat().st_size > SIZE}
