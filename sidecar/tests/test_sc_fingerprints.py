"""Engines that differ in anything that changes the meaning of the bytes never load each other's blocks (fault 15)."""

from __future__ import annotations

import pytest
from sc_nodes import Cluster, wait_for

from kvpool import config
from kvpool.client import Client
from kvpool.protocol import keys
from kvpool.protocol.wire import Tier
from kvpool_testing.history import History

FACTS = {
    "model": "meta/llama-8b", "weights": "sha256:0011", "dtype": "bfloat16", "kv_dtype": "auto", "layout": "NHD",
    "block_tokens": 256, "tensor_parallel": 1, "pipeline_parallel": 1, "rank": 0, "hash": "sha256_cbor", "lora": "",
    "engine": "vllm", "format": 1,
}  # fmt: skip
OTHERS = {
    "model": "meta/llama-70b", "weights": "sha256:0012", "dtype": "float16", "kv_dtype": "fp8_e4m3", "layout": "HND",
    "block_tokens": 128, "tensor_parallel": 2, "pipeline_parallel": 2, "rank": 1, "hash": "sha256", "lora": "a",
    "engine": "other", "format": 2,
}  # fmt: skip
HASH = b"the engine's own hash of this prefix"
SIZE = 20_000
DEADLINES = config.Deadlines(lookup_ms=2000, load_min_ms=5000)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    with Cluster(tmp_path_factory.mktemp("fingerprints"), shared=True) as c:
        yield c.node("a"), c.node("b")


def client(node, inputs) -> tuple[Client, bytes]:
    fingerprint = keys.fingerprint(inputs)
    settings = config.ClientConfig(socket=str(node.sockets["team-a"]), deadlines=DEADLINES)
    one = Client(settings, fingerprint=fingerprint, labels=inputs)
    assert one.wait_connected(10)
    return one, keys.block_id(fingerprint, HASH)


@pytest.fixture(scope="module")
def stored(nodes):
    """The same prefix, stored by an engine of FACTS; found on both nodes by one that is equal."""
    a, b = nodes
    here, name = client(a, FACTS)
    there, same = client(b, dict(reversed(FACTS.items())))
    assert name == same  # the order in which facts are told does not matter
    assert here.put_from([name], [b"k" * SIZE])[0].stored
    wait_for(lambda: there.lookup([name]) != [Tier.MISS], "the equal engine finds it on the other node")
    buffer = bytearray(SIZE)
    assert there.get_into([name], [buffer])[0].ok
    assert buffer == b"k" * SIZE
    here.close()
    there.close()
    return name


def test_the_table_changes_every_fact():
    assert FACTS.keys() == OTHERS.keys()
    assert all(FACTS[k] != OTHERS[k] for k in FACTS)


@pytest.mark.parametrize("fact", FACTS)
def test_an_engine_that_differs_in(nodes, stored, fact):
    history = History()
    history.will_store("team-a", stored, b"must never be loaded")
    for node in nodes:
        other, name = client(node, {**FACTS, fact: OTHERS[fact]})
        try:
            assert name != stored
            recorded = history.client(other, "team-a")
            # under the name that it computes, and even under the other's name
            assert recorded.lookup([name]) == [Tier.MISS]
            for asked in (name, stored):
                (result,) = recorded.get_into([asked], [bytearray(SIZE)])
                assert not result.ok
        finally:
            other.close()
    history.check()
