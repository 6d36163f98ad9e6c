"""From an engine's facts to the pool's status: what the client tells, the sidecar reports and the operator says."""

from __future__ import annotations

import json

from kvpool.protocol import keys
from kvpool.protocol.fingerprint_fields import field_digests
from kvpool.protocol.wire import ClientHello
from kvpool_operator.api.v1alpha1 import KVCachePool
from kvpool_operator.observe.engine_pods import EnginePods
from kvpool_operator.observe.snapshot import Sidecar, Snapshot
from kvpool_operator.pools.conditions import ReconcileOutcome
from kvpool_operator.pools.status import make_status
from kvpool_operator.sidecars.status import SidecarStatus
from kvpool_sidecar.serving.fingerprints import Fingerprints

INPUTS = {
    "engine": "vllm",
    "version": "0.33.0",
    "model": {"files": "secret-digest"},
    "sizes": {"tp_size": 1, "pp_size": 1},
}
POOL = {
    "metadata": {"name": "chat", "namespace": "kvpool-system", "uid": "u", "generation": 1},
    "spec": {"tiers": [{"name": "nvme", "local": {"path": "/mnt/kv", "capacity": "1Gi"}}]},
}


def hello(**changed: object) -> ClientHello:
    """What a client with these facts says, as the sidecar reads it."""
    inputs = {**INPUTS, **changed}
    said = ClientHello(keys.fingerprint(inputs), "vllm 0.33.0", "llama", fields=field_digests(inputs))
    return ClientHello.unpack(said.pack())


def test_what_differs_between_two_pods_reaches_the_pools_status_by_name():
    nodes = {"a": Fingerprints(), "b": Fingerprints()}
    nodes["a"].entered(hello(), "uid-1")
    nodes["b"].entered(hello(sizes={"tp_size": 2, "pp_size": 1}), "uid-2")
    reported = {n: SidecarStatus.parse(json.loads(json.dumps({"fingerprints": f.latest()}))) for n, f in nodes.items()}
    engines = EnginePods(names={"uid-1": "team-a/one", "uid-2": "team-a/two"})
    seen = Snapshot(raw=POOL, sidecars=tuple(Sidecar(n, True, "", r) for n, r in reported.items()), engines=engines)
    status = make_status(KVCachePool.parse(POOL), seen, ReconcileOutcome(), "id", "2026-11-21T10:00:00Z")
    (condition,) = [c for c in status["conditions"] if c["type"] == "BlocksShareable"]
    assert (condition["status"], condition["reason"]) == ("False", "FingerprintsDiffer")
    assert condition["message"].endswith("(sizes.tp_size differs) [KVP0202]")
    assert all(name in condition["message"] for name in engines.names.values())
    assert sorted((f["model"], f["engine"], *f["pods"]) for f in status["fingerprints"]) == [
        ("llama", "vllm 0.33.0", "team-a/one"),
        ("llama", "vllm 0.33.0", "team-a/two"),
    ]
    assert "secret" not in json.dumps([status, [f.latest() for f in nodes.values()]])
