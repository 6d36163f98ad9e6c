"""A tenant that asks for another's blocks gets, by every operation, what it gets for blocks that never were."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sc_nodes import Cluster, wait_for
from sc_raw import block_id, header, payload, write_block

from kvpool.protocol import wire


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    with Cluster(tmp_path_factory.mktemp("tenants"), shared=True) as c:
        yield c.node("a"), c.node("b")


@pytest.fixture(scope="module")
def theirs(nodes):
    """Blocks of team-a on the first node's drive, on its peer's way, and on the shared tier."""
    a, _b = nodes
    names = [block_id(n) for n in range(20)]
    with a.connect("team-a") as raw:
        raw.put({name: payload(n) for n, name in enumerate(names)})
    a.wait_announced()
    wait_for(lambda: a.status()["shared"]["copies"].get("copied") == 20, "copied")
    for node in nodes:  # the control: their owner finds them, on both nodes
        with node.connect("team-a") as raw:
            assert raw.get(names) == [payload(n) for n in range(20)]
    return names


def answers(node, name: bytes) -> list[object]:
    """What team-b is told of one name, by every operation; without keys and tokens, which differ for any two names."""
    reported: list[object] = []
    with node.connect("team-b") as raw:
        reported.append(raw.lookup([name]))
        reported.append(raw.lookup([name], flags=wire.Flag.EXHAUSTIVE))
        for flags in (0, wire.Flag.VERIFY, wire.Flag.LOCAL_ONLY):
            reported.append([(e.status, e.tier, e.stream, e.length, e.fd) for e in raw.open([name], flags=flags)])
        (_, answer), fds = raw.ask(wire.Op.REPORT, wire.pack_json({"corrupt": [name.hex()]}))
        reported += [answer, fds]
        ((status, token, key, fd),) = raw.begin([(name, 5000)])
        reported.append((status, fd >= 0))
        if fd >= 0:  # with the tag of the other tenant it is not accepted, with its own it is its own block
            write_block(fd, header(name, key, payload(1, 5000), os.urandom(16)), payload(1, 5000))
            reported.append(raw.commit([token]))
    return reported


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(which=st.integers(0, 19), place=st.integers(0, 1), other=st.binary(min_size=32, max_size=32))
def test_every_operation_says_the_same_of_anothers_block_as_of_none(nodes, theirs, which, place, other):
    node = nodes[place]
    assert answers(node, theirs[which]) == answers(node, other)
    with node.connect("team-a") as raw:  # and their owner still has them
        assert raw.get([theirs[which]]) == [payload(which)]
