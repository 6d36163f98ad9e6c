"""Ten causes of zero hits, planted one at a time: `kubectl describe` shows the true reason within a minute.

Pods run the real client in an engine's place. What they do after the fault is what an engine does: look up, and load.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import loadpod
import pytest
import system
from kubectl import apply, get, kubectl, until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kubectl import Proxy

pytestmark = [pytest.mark.cluster, pytest.mark.full]

NAME = "causes"
KEY = f"{system.SYSTEM}/{NAME}"
WITHIN_S = 60.0
DOCTOR_S = 10.0
BLOCK = 1 << 20
BLOCKS = 8
TOKENS = 256
CAPACITY_BLOCKS = 128
SETTINGS = {"tokens": TOKENS, "model": "llama"}
Start = "Callable[..., loadpod.LoadPod]"


@pytest.fixture(scope="module")
def pool(load_pool: str) -> Iterator[str]:
    """One local tier of 128 blocks and no shared tier: what is evicted is nowhere else."""
    tiers = [{"name": "nvme", "local": {"path": f"/var/lib/kvpool/{NAME}", "capacity": "128Mi"}}]
    system.apply_pool(NAME, tiers=tiers, cache={"maxBlockSize": "16Mi"}, deletionPolicy="Delete")
    yield KEY
    system.delete_pool(NAME)


@pytest.fixture
def start(proxy: Proxy, pool: str) -> Iterator[Callable[..., loadpod.LoadPod]]:
    """Starts pods with the settings of an engine; at the end each is held against the invariants and deleted."""
    started: list[loadpod.LoadPod] = []

    def begin(name: str, node: str, **more: Any) -> loadpod.LoadPod:
        settings = {**SETTINGS, **more}
        pod = loadpod.start(proxy, name, namespace="team-a", node=node, pool=pool, block_bytes=BLOCK, settings=settings)
        started.append(pod)
        return pod

    yield begin
    try:
        for pod in started:
            pod.check()
    finally:
        for pod in started:
            pod.delete()


def described(kind: str, name: str, namespace: str = system.SYSTEM) -> str:
    """What a user reads, in one line. `kubectl describe` writes `Evicted - Capacity` for the key `evicted-capacity`."""
    return " ".join(kubectl("-n", namespace, "describe", kind, name).split())


def shows(cause: str, *words: str, kind: str = "kvp", name: str = NAME, namespace: str = system.SYSTEM) -> None:
    """Wait until `kubectl describe` of the object has all the words, and print how long that took."""
    planted = time.monotonic()

    last = ""

    def shown() -> bool:
        nonlocal last
        last = described(kind, name, namespace)
        return all(word in last for word in words)

    try:
        until(f"{cause}: `kubectl describe {kind} {name}` shows {words}", shown, WITHIN_S)
    except AssertionError as e:
        raise AssertionError(f"{e}\n{last[-6000:]}") from None
    print(f"{cause}: shown after {time.monotonic() - planted:.1f} s")


def doctor_finds(cause: str, code: str, ask: Callable[[], Any] = lambda: None) -> None:
    """Wait until `doctor` has the code, with a fix; that run takes less than `DOCTOR_S`. `ask` precedes each run."""
    command = [sys.executable, "-m", "kvpool_cli", "doctor", KEY, "-o", "json"]
    took, codes = 0.0, []

    def found() -> bool:
        nonlocal took, codes
        ask()
        began = time.monotonic()
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        took = time.monotonic() - began
        assert done.returncode in (0, 1), done.stderr[-2000:]
        (diagnosed,) = json.loads(done.stdout)["pools"]
        codes = [one["code"] for one in diagnosed["findings"] if one["fix"]]
        return code in codes

    try:
        until(f"{cause}: doctor finds {code}", found, WITHIN_S)
    except AssertionError as e:
        raise AssertionError(f"{e}\n{codes}") from None
    assert took < DOCTOR_S, f"doctor took {took:.1f} s"
    print(f"{cause}: doctor finds {code} in {took:.1f} s")


def missed(reason: str) -> int:
    """Tokens that were missed for this reason in the last hour, by the pool's status."""
    return int(system.pool(NAME)["status"]["cache"].get("misses", {}).get(reason, 0))


def shows_misses(cause: str, reason: str, before: int) -> None:
    planted = time.monotonic()
    try:
        until(f"{cause}: status.cache.misses counts {reason}", lambda: missed(reason) > before, WITHIN_S)
    except AssertionError as e:
        raise AssertionError(f"{e}\n{system.pool(NAME)['status']['cache']}") from None
    assert reason.title().replace("-", " - ") in described("kvp", NAME)
    print(f"{cause}: shown after {time.monotonic() - planted:.1f} s")


@pytest.mark.parametrize(
    ("one", "other", "named", "code"),
    [
        ({"hash_seed": "0"}, {"hash_seed": "1"}, "(hash_seed differs)", "KVP0201"),
        (
            {"kv_dtype": "bfloat16", "sizes": {"tp_size": 1}},
            {"kv_dtype": "fp8", "sizes": {"tp_size": 2}},
            "kv_dtype",
            "KVP0202",
        ),
        ({"blocks_per_chunk": 16}, {"blocks_per_chunk": 32}, "(blocks_per_chunk differs)", "KVP0203"),
    ],
    ids=["hash seed", "data type and parallel size", "chunk size"],
)
def test_engines_whose_blocks_differ_are_named_with_the_fields(start: Any, one: Any, other: Any, named: str, code: str):
    node_a, node_b = system.workers()[:2]
    before = missed("fingerprint-differs")
    a, b = start("one", node_a, inputs=one), start("other", node_b, inputs=other)
    first = loadpod.fresh()
    assert a.put(first, BLOCKS)["ok"] == BLOCKS
    assert b.get(first, BLOCKS)["hits"] == 0
    shows("blocks differ", "FingerprintsDiffer", "team-a/one", "team-a/other", named)
    doctor_finds("blocks differ", code)
    # the node of the second pod holds no block of the first: only a pod on the same node can count the cause
    c = start("same-node", node_a, inputs=other)
    assert c.get(first, BLOCKS)["hits"] == 0
    shows_misses("blocks differ", "fingerprint-differs", before)


def test_a_pod_that_names_a_pool_that_does_not_exist_has_an_event(pool: str):
    made = loadpod.manifest("mistyped", namespace="team-a", node=system.workers()[0], pool=f"{system.SYSTEM}/cuases")
    loadpod.bring_program("team-a")
    apply(json.dumps(made))
    try:
        doctor_finds("mistyped pool", "KVP0104")
        shows("mistyped pool", "cuases", "does not exist", kind="pod", name="mistyped", namespace="team-a")
    finally:
        kubectl("-n", "team-a", "delete", "pod", "mistyped", "--wait=true", "--timeout=60s")


def test_a_pod_that_is_skipped_has_an_event_with_the_reason_and_the_pool_counts_it(pool: str):
    made = loadpod.manifest("unknown", namespace="team-a", node=system.workers()[0], pool=pool)
    del made["metadata"]["annotations"]["kvpool.dev/engine"]
    loadpod.bring_program("team-a")
    apply(json.dumps(made))
    try:
        shows("skipped", "unsupported-engine")
        words = ("InjectionSkipped", "no container runs a known engine")
        shows("skipped", *words, kind="pod", name="unknown", namespace="team-a")
        doctor_finds("skipped", "KVP0103")
    finally:
        kubectl("-n", "team-a", "delete", "pod", "unknown", "--wait=true", "--timeout=60s")


def test_an_engine_that_refuses_the_plug_in_is_named_with_its_sentence(start: Any):
    pod = start("refuses", system.workers()[0])
    assert pod.put(loadpod.fresh(), 1)["ok"]
    sentence = "kvpool.engines.vllm does not work with this vLLM: JobResult is missing"
    pod.order("problem", text=sentence)
    shows("engine refuses", "EnginesConnected", "team-a/refuses", sentence)
    shows("engine refuses", sentence, kind="pod", name="refuses", namespace="team-a")
    doctor_finds("engine refuses", "KVP0301")


def test_a_namespace_that_the_pool_does_not_admit_is_named_at_the_pod(pool: str):
    system.label("team-c", {"pod-security.kubernetes.io/enforce": "restricted"})
    made = loadpod.manifest("denied", namespace="team-c", node=system.workers()[0], pool=pool)
    loadpod.bring_program("team-c")
    apply(json.dumps(made))
    try:
        shows("denied", "namespace-not-allowed", kind="pod", name="denied", namespace="team-c")
        assert get("pod", "-n", "team-c", "denied")["metadata"]["annotations"]["kvpool.dev/skip-reason"]
        doctor_finds("denied", "KVP0106")
    finally:
        kubectl("-n", "team-c", "delete", "pod", "denied", "--wait=true", "--timeout=60s")


def test_a_tier_that_evicts_before_the_next_use_shows_evictions(start: Any):
    pod, first, before = start("thrash", system.workers()[0]), loadpod.fresh(), missed("evicted-capacity")
    for at in range(0, 2 * CAPACITY_BLOCKS, 64):
        assert pod.put(first + at, 64)["ok"]

    def evicted() -> bool:
        outcome: dict[str, int] = pod.get(first, 2 * CAPACITY_BLOCKS)["outcome"]
        return outcome.get("absent", 0) >= CAPACITY_BLOCKS // 2

    until("older blocks are evicted", evicted, 60)
    shows_misses("thrash", "evicted-capacity", before)
    doctor_finds("thrash", "KVP0501", lambda: pod.get(first, 2 * CAPACITY_BLOCKS))


def test_an_engine_that_computes_faster_than_it_loads_shows_it(start: Any):
    pod = start("fast", system.workers()[0], client={"break_even": True})
    first, before = loadpod.fresh(), missed("slower-than-compute")
    pod.order("computed", tokens=1_000_000, seconds=0.001)
    assert pod.put(first, BLOCKS)["ok"] == BLOCKS
    assert pod.get(first, BLOCKS)["hits"]
    until("lookups are held back", lambda: pod.get(first, BLOCKS)["outcome"].get("absent"), 30)
    shows_misses("slower than compute", "slower-than-compute", before)
    doctor_finds("slower than compute", "KVP0504", lambda: pod.get(first, BLOCKS))


def test_a_node_that_cannot_reach_another_is_named_with_the_pair(start: Any):
    """A NetworkPolicy closes the peer port; the control is the hit from the peer before."""
    node_a, node_b = system.workers()[:2]
    a, b = start("reader", node_a), start("holder", node_b)
    first, before = loadpod.fresh(), missed("peer-unreachable")
    assert b.put(first, 2 * BLOCKS)["ok"] == 2 * BLOCKS
    until("blocks come from the peer", lambda: a.get(first, 1)["outcome"].get("peer"), 60)
    selector = {"matchLabels": {"kvpool.dev/pool": NAME, "app.kubernetes.io/component": "sidecar"}}
    policy = {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": "no-peers", "namespace": system.SYSTEM},
        "spec": {
            "podSelector": selector,
            "policyTypes": ["Ingress"],
            "ingress": [{"ports": [{"port": port, "protocol": "TCP"} for port in (7422, 7423)]}],
        },
    }
    apply(json.dumps(policy))
    try:
        # a connection that was there before continues: both sidecars start again
        sidecars = f"kvpool.dev/pool={NAME},app.kubernetes.io/component=sidecar"
        kubectl("-n", system.SYSTEM, "delete", "pod", "-l", sidecars)
        for node in (node_a, node_b):
            until(f"the sidecar of {node} is back", lambda node=node: system.pod_ready(system.sidecar(node, NAME)), 90)
        for pod in (a, b):
            pod.wait_connected()
        if a.get(first + 1, 1)["outcome"].get("peer"):
            assert not system.network_enforces_policies()
            pytest.skip("this cluster's pod network does not enforce NetworkPolicies")
        shows("unreachable peer", "PeersUnreachable", f"{node_a} from {node_b}")
        doctor_finds("unreachable peer", "KVP0402")
        doctor_finds("unreachable peer", "KVP0403")
        until("the reader asks", lambda: not a.get(first + BLOCKS, BLOCKS)["hits"], 30)
        shows_misses("unreachable peer", "peer-unreachable", before)
    finally:
        kubectl("-n", system.SYSTEM, "delete", "networkpolicy", "no-peers", "--wait=true")
    until("each node has read from the other again", lambda: "PeersVerified" in described("kvp", NAME), 120)


def test_blocks_that_expired_are_counted_as_expired(start: Any):
    """Last: from here on nothing of this pool lives for longer than five seconds."""
    pod, first, before = start("late", system.workers()[0]), loadpod.fresh(), missed("expired")
    assert pod.put(first, BLOCKS)["ok"] == BLOCKS
    patch = json.dumps({"spec": {"cache": {"ttl": {"maxAge": "5s"}}}})
    kubectl("-n", system.SYSTEM, "patch", "kvp", NAME, "--type=merge", "-p", patch)
    until("the blocks are gone", lambda: not pod.get(first, BLOCKS)["hits"], 120, every=5)
    shows_misses("expired", "expired", before)
    doctor_finds("expired", "KVP0502", lambda: pod.get(first, BLOCKS))
