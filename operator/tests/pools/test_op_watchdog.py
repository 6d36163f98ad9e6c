"""Pods that run without the pool or with an old client: who is told, who is evicted, and who is left alone."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from op_samples import ENV, MemoryCluster, pool, pool_manifest

from kvpool.config import ClientConfig
from kvpool_operator.api.annotations import ENGINE_KINDS
from kvpool_operator.api.quantity import to_bytes
from kvpool_operator.desired.config import to_client_config
from kvpool_operator.errors import (
    ApiUnavailableError,
    ConflictError,
    EvictionBlockedError,
    NotLeaderError,
    OperatorError,
    RejectedError,
)
from kvpool_operator.injection.annotations import parse_annotations
from kvpool_operator.injection.connector import client_config
from kvpool_operator.injection.engines import INJECTORS as INJECTORS
from kvpool_operator.injection.mutator import InjectionSettings, inject, mark_skipped
from kvpool_operator.injection.revision import revisions
from kvpool_operator.injection.skip import Skip, SkipReason
from kvpool_operator.observe.engine_pods import EnginePod, EnginePods, Owner, count, slim_engine_pod
from kvpool_operator.observe.snapshot import Snapshot, Webhook
from kvpool_operator.pools.injection_watchdog import EvictionHistory, next_candidate, pod_event
from kvpool_operator.pools.pod_evictor import MAX_EVENTS_PER_RECONCILE, EvictionRound, PodEvictor

if TYPE_CHECKING:
    from kvpool_operator.k8s.client import ObjectRef

SET = Owner("ReplicaSet", "engines", "rs-1")


def a_pod(name: str, state: Any = "not_injected", owner: Owner | None = SET, **more: Any) -> EnginePod:
    return EnginePod("team", name, f"uid-{name}", state, owner=owner, **{"ready": True, **more})


def good(name: str, **more: Any) -> EnginePod:
    return a_pod(name, "injected", **more)


def next_of(
    *pods: EnginePod, memory: EvictionHistory | None = None, now: float = 1000.0, target: str = "t"
) -> str | None:
    found = next_candidate(pods, memory or EvictionHistory(last=0.0), target, now, 60.0)
    return found.name if found else None


# -- which one --------------------------------------------------------------------------------------------------------


def test_a_pod_that_was_missed_goes_before_one_with_an_old_client():
    assert next_of(good("a", outdated="client"), a_pod("b"), good("c")) == "b"
    assert next_of(good("a", outdated="client"), good("c")) == "a"
    assert next_of(good("c"), a_pod("d", "skipped")) is None


@pytest.mark.parametrize("owner", [None, Owner("Job", "j", "u"), Owner("Node", "n", "u")])
def test_who_would_not_be_made_again_stays(owner: Owner | None):
    assert next_of(a_pod("a", owner=owner)) is None


def test_only_one_of_a_small_owner_is_away_at_a_time():
    assert next_of(a_pod("a"), good("b", ready=False)) is None
    assert next_of(a_pod("a"), good("b", leaving=True)) is None
    assert next_of(a_pod("a"), good("b", ready=False, owner=Owner("StatefulSet", "other", "s"))) == "a"
    assert next_of(a_pod("a", ready=False), good("b")) == "a", "it is away itself"


def test_never_more_than_a_tenth_of_a_large_owner_is_away():
    many = [good(f"p{i:02}") for i in range(28)]
    assert next_of(a_pod("a"), a_pod("b"), *many) == "a"
    two_away = [replace(p, ready=False) for p in many[:2]]
    assert next_of(a_pod("a"), *two_away, *many[2:], good("c")) == "a"
    three_away = [replace(p, ready=False) for p in many[:3]]
    assert next_of(a_pod("a"), *three_away, *many[3:], good("c")) is None


def test_one_in_its_time():
    memory = EvictionHistory(last=0.0)
    assert next_of(a_pod("a"), memory=memory, now=59.0) is None, "also the first one, after the process began"
    assert next_of(a_pod("a"), memory=memory, now=60.0) == "a"


def test_an_owner_whose_new_pods_are_no_better_is_left_alone_longer_and_longer():
    memory, old = EvictionHistory(last=0.0), [a_pod("a"), a_pod("b")]
    memory.record_eviction(old[0], old, "t", 100.0)
    assert next_of(good("new"), old[1], memory=memory, now=200.0) == "b", "it helped"
    no_better = [a_pod("again"), old[1]]
    memory.forget(no_better, 200.0)
    assert next_of(*no_better, memory=memory, now=200.0) is None
    assert next_of(*no_better, memory=memory, now=200.0, target="another spec") == "again"
    assert next_of(*no_better, memory=memory, now=3699.0) is None
    assert next_of(*no_better, memory=memory, now=3700.0) == "again"
    memory.record_eviction(no_better[0], no_better, "t", 3700.0)
    still = [a_pod("third"), old[1]]
    assert next_of(*still, memory=memory, now=3700.0 + 7199) is None
    assert next_of(*still, memory=memory, now=3700.0 + 7200) == "b"


def test_what_is_remembered_goes_with_the_owner():
    memory, pods = EvictionHistory(last=0.0), [a_pod("a")]
    memory.record_eviction(pods[0], pods, "t", 1.0)
    memory.record_blocked(pods[0], 50.0)
    memory.forget([a_pod("x", owner=Owner("ReplicaSet", "x", "rs-2"))], 2.0)
    assert memory.attempts == {} == memory.blocked_until


def test_what_is_said_of_a_pod():
    not_injected, old = pod_event(a_pod("a"), "sys/chat"), pod_event(good("b", outdated="configuration"), "sys/chat")
    assert not_injected is not None
    assert old is not None
    assert (not_injected.reason, not_injected.warning) == ("NotInjected", True)
    assert (old.reason, old.warning) == ("InjectionOutdated", False)
    assert "older configuration of the pool sys/chat" in old.message
    assert pod_event(good("c"), "sys/chat") is pod_event(a_pod("d", leaving=True), "sys/chat") is None


def test_a_pod_whose_warnings_only_its_controller_saw_has_them_in_an_event():
    event = pod_event(good("a", warnings="host memory tier is 512Mi"), "sys/chat")
    assert event is not None
    assert (event.reason, event.warning, event.about_owner) == ("InjectionLimited", True, False)
    assert event.message == "the pod was injected for the pool sys/chat: host memory tier is 512Mi [KVP0110]"


@pytest.mark.parametrize("reason", ["ImagePullBackOff", "ErrImagePull", "PodInitializing"])
def test_a_pod_that_waits_for_the_image_of_the_client_says_how_to_go_on_without(reason: str):
    pod = webhook_injects()
    client = {"name": "kvpool-client", "state": {"waiting": {"reason": reason, "message": "Back-off " * 100}}}
    pod |= {"status": {"phase": "Pending", "initContainerStatuses": [{"name": "other"}, client]}}
    (found,) = counted(slim_engine_pod(pod)).pods
    event = pod_event(found, "team/chat")
    if reason == "PodInitializing":
        assert event is None
        return
    assert event is not None
    assert (event.reason, event.warning, event.about_owner) == ("ClientImageUnavailable", True, True)
    assert f"({reason})" in event.message
    assert "kvpool.dev/inject: disabled" in event.message
    assert "Back-off" not in event.message


# -- what makes a pod outdated ----------------------------------------------------------------------------------------


def webhook_injects(engine: str = "vllm", **spec: Any) -> dict[str, Any]:
    """A pod as the webhook makes it for the pool."""
    made = pool(**spec)
    reported = made.spec.injection
    injection = InjectionSettings(
        pool=made.key,
        block_tokens=made.spec.cache.block_tokens,
        host_memory_bytes=to_bytes(reported.vllm.host_memory),
        client_config=client_config(to_client_config(made)),
        sidecar_image=ENV.sidecar_image,
        kvbm_host_bytes=to_bytes(reported.dynamo.host_memory),
        kvbm_disk_bytes=to_bytes(reported.dynamo.disk_cache),
    )
    command = {"vllm": ["vllm", "serve", "m"], "sglang": ["sglang", "serve", "m"]}.get(engine, ["python"])
    pod = {
        "metadata": {"name": "e", "namespace": "team", "annotations": {"kvpool.dev/engine": engine}},
        "spec": {"containers": [{"name": "c", "image": "i", "command": command}]},
    }
    return inject(pod, parse_annotations(pod), injection).pod


def counted(pod: dict[str, Any], image: str = ENV.sidecar_image, **spec: Any) -> EnginePods:
    return count([pod], "kvpool-system", "chat", image, revisions(pool(**spec)))


@pytest.mark.parametrize("engine", ["vllm", "sglang", "dynamo", "none"])
def test_a_pod_that_was_just_injected_is_not_outdated(engine: str):
    found = counted(webhook_injects(engine))
    assert (found.injected, found.outdated) == (1, 0)


@pytest.mark.parametrize(
    ("engine", "spec"),
    [
        ("vllm", {"cache": {"blockTokens": 128}}),
        ("vllm", {"injection": {"vllm": {"hostMemory": "1Gi"}}}),
        ("sglang", {"failOpen": {"breaker": {"failures": 7}}}),
        ("dynamo", {"injection": {"dynamo": {"diskCache": "1Gi"}}}),
    ],
)
def test_a_change_of_what_it_was_told_makes_a_pod_outdated(engine: str, spec: dict[str, Any]):
    assert [p.outdated for p in counted(webhook_injects(engine), **spec).pods] == ["configuration"]
    assert counted(webhook_injects(engine, **spec), **spec).outdated == 0


def test_a_change_that_does_not_concern_a_pod_leaves_it_as_it_is():
    assert counted(webhook_injects("sglang"), injection={"vllm": {"hostMemory": "1Gi"}}).outdated == 0
    assert counted(webhook_injects("vllm"), cache={"eviction": {"highWatermark": 91}}).outdated == 0


def test_another_client_makes_a_pod_outdated_also_without_the_annotation():
    pod = webhook_injects()
    del pod["metadata"]["annotations"]["kvpool.dev/injected-revision"]
    assert [p.outdated for p in counted(pod).pods] == [""]
    assert [p.outdated for p in counted(pod, image="kvpool-sidecar:next").pods] == ["client"]


def test_a_second_pass_does_not_say_that_the_pod_is_new():
    pod = webhook_injects()
    changed = pool(cache={"blockTokens": 128})
    reported = InjectionSettings(
        changed.key, 128, 4 << 30, client_config(ClientConfig(pool=changed.key)), ENV.sidecar_image
    )
    again = inject(pod, parse_annotations(pod), reported).pod
    assert counted(again, cache={"blockTokens": 128}).outdated == 1


def test_a_pod_that_was_copied_and_then_skipped_carries_no_word():
    pod = webhook_injects()
    pod["spec"]["initContainers"] = []
    left = mark_skipped(pod, Skip(SkipReason.POOL_NOT_FOUND, "there is none"))
    assert not {k for k in left["metadata"]["annotations"] if k.startswith("kvpool.dev/injected")}


def test_every_family_of_the_webhook_has_its_word():
    assert set(ENGINE_KINDS) == set(INJECTORS) == set(revisions(pool()))


def test_pods_that_leave_count_for_nothing_but_their_owner():
    owner = {"kind": "ReplicaSet", "name": "engines", "uid": "rs-1", "controller": True}
    other = {"kind": "Thing", "name": "t", "uid": "t", "controller": False}
    notes = {"kvpool.dev/pool": "chat"}
    gone = {
        "metadata": {
            "name": "b",
            "namespace": "team",
            "uid": "1",
            "annotations": notes,
            "deletionTimestamp": "now",
            "ownerReferences": [other, owner],
        },
        "status": {"conditions": [{"type": "Ready", "status": "True"}]},
    }
    found = count([gone], "sys", "chat", "i", {})
    assert (found.selected, found.not_injected, found.not_injected_names) == (0, 0, ())
    assert found.pods == (EnginePod("team", "b", "1", "not_injected", owner=SET, ready=True, leaving=True),)


# -- Events and evictions ---------------------------------------------------------------------------------------------


class Evictions(MemoryCluster):
    """A cluster that answers evictions as a test says."""

    def __init__(self, *answers: OperatorError | None) -> None:
        super().__init__()
        self.answers = list(answers)
        self.evicted: list[tuple[str, str]] = []

    async def evict(self, target: ObjectRef, *, uid: str) -> None:
        self.evicted.append((target.name, uid))
        if self.answers and (answer := self.answers.pop(0)) is not None:
            raise answer

    @property
    def events(self) -> list[tuple[str, str]]:
        found = [o for r, o in self.objects.items() if r.kind == "Event"]
        return [(e["reason"], f"{e['involvedObject']['namespace']}/{e['involvedObject']['name']}") for e in found]


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


RESTART = {"injection": {"watchdog": "Restart"}}


class World:
    def __init__(self, *answers: OperatorError | None) -> None:
        self.cluster, self.clock = Evictions(*answers), Clock()
        self.restarts = PodEvictor(self.cluster, clock=self.clock)

    async def look(self, *pods: EnginePod, after: float = 60.0, problem: str = "", **spec: Any) -> EvictionRound:
        self.clock.now += after
        engines = EnginePods(pods=pods, not_injected=sum(p.state == "not_injected" for p in pods))
        seen = Snapshot(raw=pool_manifest(), engines=engines, webhook=Webhook(problem))
        return await self.restarts.reconcile(pool(**(spec or RESTART)), seen, "t")


async def test_each_pod_is_told_of_once_and_some_at_a_time():
    world, pods = World(), [a_pod(f"p{i}", owner=None) for i in range(MAX_EVENTS_PER_RECONCILE + 2)]
    await world.look(*pods, injection={})
    assert len(world.cluster.events) == MAX_EVENTS_PER_RECONCILE
    for _ in range(3):
        await world.look(*pods, injection={})
    assert len(world.cluster.events) == len(pods)
    await PodEvictor(world.cluster, clock=world.clock).reconcile(  # another process
        pool(), Snapshot(raw=pool_manifest(), engines=EnginePods(pods=(pods[0],))), "t"
    )
    assert len(world.cluster.events) == len(pods)
    assert world.cluster.evicted == []


async def test_only_who_asks_for_restarts_gets_them():
    world = World()
    await world.look(a_pod("a"), after=0, **{**RESTART, "mode": "DryRun"})
    assert world.cluster.events == []
    await world.look(a_pod("a"), after=0)
    for spec in (
        {"injection": {}},
        {**RESTART, "mode": "Paused"},
        {"injection": {"watchdog": "Restart", "enabled": False}},
    ):
        assert await world.look(a_pod("a"), **spec) == EvictionRound()
    assert await world.look(a_pod("a"), problem="no replica of the webhook is ready") == EvictionRound()
    assert world.cluster.evicted == []
    assert await world.look(a_pod("a")) == EvictionRound(("evicted",))
    assert world.cluster.evicted == [("a", "uid-a")]
    assert ("EvictedForInjection", "team/a") in world.cluster.events


async def test_evictions_of_a_pool_come_one_after_the_other():
    world = World()
    await world.look(after=0)
    many = [a_pod(f"p{i}", owner=Owner("ReplicaSet", f"r{i}", f"rs-{i}")) for i in range(9)]
    for _ in range(9):
        await world.look(*many, after=20)
    assert len(world.cluster.evicted) == 3


async def test_a_budget_that_holds_one_back_does_not_hold_others():
    world = World(EvictionBlockedError("no"), None)
    await world.look(after=0)
    pods = [a_pod("a"), a_pod("b", owner=Owner("ReplicaSet", "r", "rs-2"))]
    first = await world.look(*pods)
    assert first.outcomes == ("held",)
    assert "PodDisruptionBudget keeps team/a" in first.problem
    assert (await world.look(*pods, after=1)).outcomes == ("evicted",)
    assert [name for name, _ in world.cluster.evicted] == ["a", "b"]
    assert (await world.look(*pods[:1])).outcomes == ("evicted",)


async def test_what_an_eviction_may_meet():
    world = World(
        ConflictError("gone"), RejectedError("no", 403), RejectedError("odd", 422), ApiUnavailableError("away")
    )
    await world.look(after=0)
    assert await world.look(a_pod("a")) == EvictionRound(("gone",))
    refused = await world.look(a_pod("a"))
    assert refused.outcomes == ("refused",)
    assert "operator.restartPods" in refused.problem
    again = await world.look(a_pod("a"), after=1)
    assert again == EvictionRound(problem=refused.problem), "not again at once, and the reason stays"
    assert await world.look(a_pod("a"), problem="no replica of the webhook is ready") == EvictionRound()
    assert "odd" in (await world.look(a_pod("a"))).problem
    assert await world.look(a_pod("a")) == EvictionRound(("failed",))
    world.cluster.answers = [NotLeaderError("lost")]
    with pytest.raises(NotLeaderError):
        await world.look(a_pod("a"))


async def test_a_pool_that_is_gone_is_forgotten():
    world = World()
    await world.look(a_pod("a"), after=0)
    world.restarts.forget("kvpool-system/chat")
    assert await world.look(a_pod("a")) == EvictionRound(), "its first eviction waits its pause again"
