"""`kvpool simulate` against real sidecars: the same prompts on the same nodes give the same hits and bytes by path."""

from __future__ import annotations

import contextlib
import json
import random
from collections import Counter
from typing import NamedTuple

import pytest
from sc_nodes import wait_for
from sc_raw import payload

from kvpool import config
from kvpool.protocol.wire import CommitStatus, Op, Tier
from kvpool_cli.planner.replay import TRACE_BLOCK, read_trace
from kvpool_cli.simulator.pool import PoolSimulator
from kvpool_cli.simulator.settings import NodeHardware, PoolSettings
from kvpool_cli.simulator.workload import make_requests
from kvpool_sidecar.storage.local.writer import file_space

NAMES = ("n1", "n2", "n3")
PAYLOAD = 12 << 10
BLOCKS_OF_A_NODE = 90
EVERY_S = 60.0
"""Between two requests: longer than all delays, as the real nodes are waited for after each."""
CLOSE = 0.05
PATIENT_MS = 20_000
"""A deadline that passes on a busy machine would be a miss, which is not simulated."""


def lines(count=16, turns=5, first=8, more=3, seed=5):
    """Prompts of sessions that take turns at random, over one system prompt of two blocks."""
    rng = random.Random(seed)
    prompts = {n: [0, 1] for n in range(count)}
    order = [n for n in range(count) for _ in range(turns)]
    rng.shuffle(order)
    fresh, found = 2, []
    for at, n in enumerate(order):
        added = first if len(prompts[n]) == 2 else more
        prompts[n] += range(fresh, fresh + added)
        fresh += added
        ids = list(prompts[n])
        found.append({"timestamp": at * EVERY_S * 1000, "input_length": TRACE_BLOCK * len(ids), "hash_ids": ids})
    return found


class Prefix(NamedTuple):
    """The tiers of the blocks before the first miss, perhaps none."""

    tiers: list[Tier]


class Chosen:
    """Records the nodes that the simulation's router chooses, so that the real requests go to the same ones."""

    def __init__(self, router):
        self.router, self.numbers = router, []

    def choose(self, request, alive, now):
        node = self.router.choose(request, alive, now)
        self.numbers.append(node.number)
        return node


def drive(home, size):
    return config.LocalTier("nvme", str(home / "nvme"), size, reserve_free_percent=0)


def settle(node):
    """Wait until a node has evicted to its watermarks and the index has what it holds."""
    limit = BLOCKS_OF_A_NODE * file_space(PAYLOAD) * 85 // 100

    def is_settled():
        status = node.status()
        return status["used_bytes"] <= limit and status["index"]["announced"] == status["blocks"]

    wait_for(is_settled, f"{node.name} has evicted and announced", 60)


def read_prefix(raw, ids):
    """Read the blocks before the first miss; return their tiers; None if a location was outdated.

    A sidecar remembers locations for 30 s, and simulated requests are further apart: an outdated one is not counted.
    """
    found = raw.lookup(ids, ms=PATIENT_MS)
    prefix = next((n for n, tier in enumerate(found) if tier == Tier.MISS), len(ids))
    entries = raw.open(ids[:prefix], ms=PATIENT_MS) if prefix else []
    outdated = [one.hex() for one, entry in zip(ids, entries, strict=False) if raw.read(entry) is None]
    if outdated:  # a report makes the sidecar query the index again
        raw.ask(Op.REPORT, json.dumps({"corrupt": outdated}).encode())
        return None
    return Prefix([Tier(entry.tier) for entry in entries])


@pytest.mark.timeout(600)
@pytest.mark.parametrize("router", ["round-robin", "sticky"])
def test_hit_rate_and_bytes_by_path_are_those_of_real_sidecars_within_five_percent(cluster, tmp_path, router):
    (tmp_path / "trace").write_text("".join(json.dumps(line) + "\n" for line in lines()))
    requests = make_requests(read_trace(tmp_path / "trace"))
    room = BLOCKS_OF_A_NODE * file_space(PAYLOAD)
    settings = PoolSettings(
        nodes=len(NAMES), router=router, hardware=NodeHardware(drive_bytes=room), block_bytes=PAYLOAD
    )
    simulator = PoolSimulator(settings, requests)
    simulator._router = chosen = Chosen(simulator._router)
    simulated = simulator.run()
    assert simulated.evicted_blocks > 0
    assert simulated.hit_rate < simulated.bound

    with cluster() as c, contextlib.ExitStack() as stack:
        index = config.IndexConfig(c.index_url, username="kvpool", lookup_timeout_ms=PATIENT_MS, lease_s=60)
        nodes = [c.node(name, local=(drive(c.directory / name, room),), index=index) for name in NAMES]
        path: Counter[str] = Counter()
        tokens = found_tokens = 0
        links = [stack.enter_context(node.connect(timeout=60)) for node in nodes]
        for request, number in zip(requests, chosen.numbers, strict=True):
            raw = links[number - 1]
            ids = list(request.keys)
            tiers = wait_for(lambda raw=raw, ids=ids: read_prefix(raw, ids), "no location is outdated", 60).tiers
            prefix = len(tiers)
            for tier in tiers:
                path[tier.name.lower()] += PAYLOAD
            path["computed"] += (len(ids) - prefix) * PAYLOAD
            tokens += request.tokens
            found_tokens += prefix * TRACE_BLOCK
            if prefix < len(ids):
                stored = raw.put({one: payload(int.from_bytes(one[:8], "little"), PAYLOAD) for one in ids[prefix:]})
                assert set(stored) <= {CommitStatus.STORED, CommitStatus.HAVE}
            for node in nodes:
                settle(node)

    print(router, simulated.hit_rate, found_tokens / tokens, simulated.data()["bytes"], dict(path))
    assert simulated.hit_rate == pytest.approx(found_tokens / tokens, rel=CLOSE)
    data = simulated.data()["bytes"]
    assert {name for name, size in data.items() if size} == {name for name, size in path.items() if size}
    for name, size in path.items():
        assert data[name] == pytest.approx(size, rel=CLOSE), name
