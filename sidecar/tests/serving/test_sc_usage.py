"""Which pods use which kind of blocks, as /status tells it: bounded, and forgetful of what is not in use first."""

from __future__ import annotations

from sc_nodes import Cluster, wait_for

from kvpool import config
from kvpool.client import Client
from kvpool.protocol import keys
from kvpool.protocol.wire import ClientHello
from kvpool_sidecar.serving.fingerprints import Fingerprints


def hello(number: int, **fields: str) -> ClientHello:
    return ClientHello(number.to_bytes(32, "big"), "vllm 0.33", "llama", fields=fields)


def shown(known: Fingerprints) -> list[tuple[int, int, list[tuple[str, bool, int]]]]:
    return [
        (int(f["digest"], 16), f["connected"], [(p["uid"], p["connected"], p["seen"]) for p in f["pods"]])
        for f in known.latest()
    ]


def test_a_pod_is_connected_as_long_as_one_of_its_connections_is():
    now = [100.0]
    known = Fingerprints(lambda: now[0])
    one = hello(1, kv_dtype="0badcafe")
    for _ in range(2):
        known.entered(one, "a")
    known.entered(one, "b")
    known.left(one, "a")
    now[0] = 200.0
    assert shown(known) == [(1, 2, [("a", True, 200), ("b", True, 200)])]
    known.left(one, "a")
    known.left(one, "a")  # once too often changes nothing
    now[0] = 300.0
    assert shown(known) == [(1, 1, [("b", True, 300), ("a", False, 200)])]
    assert known.latest()[0]["fields"] == {"kv_dtype": "0badcafe"}
    known.stored(hello(1), 5)  # a client of before does not take the fields away
    assert (known.latest()[0]["fields"], known.latest()[0]["bytes"]) == ({"kv_dtype": "0badcafe"}, 5)


def test_what_is_in_use_is_shown_first_and_forgotten_last():
    known = Fingerprints(lambda: 0.0)
    known.entered(hello(1), "a")
    for n in range(2, 200):
        known.entered(hello(n), "b")
        known.left(hello(n), "b")
    assert len(known.known()) == 64
    assert [digest for digest, *_ in shown(known)] == [1, *range(199, 190, -1)]
    for n in range(200, 300):
        known.entered(hello(n), "c")  # all of them stay: then the oldest goes
    assert len(known.known()) == 64
    known.left(hello(1), "a")  # forgotten: nothing happens


def test_pods_of_one_kind_are_bounded():
    known = Fingerprints(lambda: 7.0)
    known.entered(hello(1), "first")
    for n in range(100):
        known.entered(hello(1), f"{n:03}")
        known.left(hello(1), f"{n:03}")
    ((_, connected, pods),) = shown(known)
    assert (connected, len(pods)) == (1, 16)
    assert pods[0] == ("first", True, 7)


def test_a_sidecar_tells_which_pod_uses_which_kind_and_what_differs(tmp_path):
    inputs = {"model": {"name": "llama"}, "kv_dtype": "bfloat16", "sizes": {"tp_size": 1}}
    with Cluster(tmp_path) as cluster:
        node = cluster.node("a")

        def connect(**changed: object) -> Client:
            reported = {**inputs, **changed}
            settings = config.ClientConfig(socket=str(node.sockets["team-a"]))
            labels = {"engine": "vllm 0.33", "model": "llama"}
            client = Client(
                settings, fingerprint=keys.fingerprint(reported), labels=labels, fingerprint_inputs=reported
            )
            assert client.wait_connected(10)
            return client

        one, other = connect(), connect(sizes={"tp_size": 2})
        found = {f["digest"]: f for f in node.status()["fingerprints"]}
        mine, theirs = found[one.fingerprint.hex()], found[other.fingerprint.hex()]
        assert [n for n in mine["fields"] if mine["fields"][n] != theirs["fields"][n]] == ["sizes.tp_size"]
        assert mine["pods"][0]["uid"] == theirs["pods"][0]["uid"]
        assert mine["connected"] == theirs["connected"] == 1
        assert "team-a" not in str(node.status()), "a name of a tenant"
        other.close()

        def gone() -> bool:
            kinds = {f["digest"]: f for f in node.status()["fingerprints"]}
            return kinds[other.fingerprint.hex()]["connected"] == 0

        wait_for(gone, "the sidecar notices that a client has closed")
        one.close()
