"""Calls that are given up at random points never get each other's answers (fault 25): bytes tell whose they are."""

from __future__ import annotations

import contextlib
import random
import threading
import time

import pytest
from sc_nodes import Cluster, wait_for
from sc_raw import FINGERPRINT

from kvpool import config
from kvpool.client import Client
from kvpool_testing.history import History
from kvpool_testing.residue import unsettled
from kvpool_testing.stalls import Stalls
from kvpool_testing.traffic import block_id_of, payload_of

SIZE = 100_000
BLOCKS = 24
CALLS = 80
DEADLINES = config.Deadlines(breaker_failures=1_000_000)
_TURNS = 20  # a busy machine may need several until enough calls were in time


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    with Cluster(tmp_path_factory.mktemp("given-up")) as c:
        yield [c.node("a"), c.node("b")]


@pytest.mark.parametrize("connections", [1, 4])
def test_calls_that_are_given_up_at_random_never_get_each_others_answers(nodes, connections):
    names = [block_id_of(FINGERPRINT, n) for n in range(BLOCKS)]
    with Stalls() as stalls, contextlib.ExitStack() as ends:
        history = History(stalls)
        clients = []
        for node in nodes:
            for tenant in ("team-a", "team-b"):
                settings = config.ClientConfig(
                    socket=str(node.sockets[tenant]), connections=connections, connect_retry_ms=10, deadlines=DEADLINES
                )
                client = Client(settings, fingerprint=FINGERPRINT)
                ends.callback(client.close)
                assert client.wait_connected(10)
                clients.append(history.client(client, tenant))
        for one in clients[:2]:  # on the first node: the other one reads them as a peer's
            for name in names:
                data = payload_of(one.tenant, name, SIZE)
                wait_for(lambda one=one, name=name, data=data: one.put_from([name], [data])[0].ok, "stored")
        wait_for(lambda: clients[2].lookup(names, time.monotonic() + 1)[-1] != 0, "found on the other node")

        def ask(one, seed: int) -> None:
            rng = random.Random(seed)
            buffers = [bytearray(SIZE) for _ in range(6)]
            for _ in range(CALLS):
                some = rng.sample(names, 6)
                until = time.monotonic() + rng.choice([0.0001, 0.001, 0.003, 0.01, 0.03, 1.0]) * rng.random()
                if rng.random() < 0.3:
                    one.lookup(some, until, exhaustive=True)
                else:
                    one.get_into(some, buffers, until)

        def outcomes(*wanted: str) -> int:
            return sum(history.counts[f"load:{outcome}"] for outcome in wanted)

        for turn in range(_TURNS):
            threads = [threading.Thread(target=ask, args=(one, turn << 8 | i)) for i, one in enumerate(clients * 2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            history.check()
            if outcomes("local", "peer") > 30 and outcomes("deadline", "busy", "no-sidecar") > 30:
                break
        # some were in time and some were not: else nothing was shown
        assert outcomes("local", "peer") > 30
        assert outcomes("deadline", "busy", "no-sidecar") > 30
    for node in nodes:
        wait_for(lambda node=node: unsettled(node.status()) == [], "quiet")
