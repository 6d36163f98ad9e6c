"""KVCacheTenants: what is refused, which namespaces are whose, and what their status says."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from op_samples import ENV, SECRET, MemoryCluster, listers, pool, pool_manifest

from kvpool.config import PoolConfig, TenantConfig, digest, loads
from kvpool.protocol.keys import tenant_tag
from kvpool_operator.api import crdgen
from kvpool_operator.api.conditions import find
from kvpool_operator.api.resources import TENANT
from kvpool_operator.api.tenant import KVCacheTenant
from kvpool_operator.desired.inputs import Inputs
from kvpool_operator.errors import InvalidPoolError, RejectedError, SidecarUnavailableError
from kvpool_operator.k8s.client import ObjectRef
from kvpool_operator.observe.observer import Observer, ObserverConfig
from kvpool_operator.observe.snapshot import Sidecar, Snapshot
from kvpool_operator.pools.config_push import ConfigPusher
from kvpool_operator.pools.reconciler import PoolDependencies, PoolReconciler
from kvpool_operator.sidecars.operation import OperationProgress, SidecarAddress
from kvpool_operator.sidecars.status import ReportedTenantUsage, SidecarStatus
from kvpool_operator.tenants.resolver import resolve, tenant_status, to_configs

if TYPE_CHECKING:
    from kvpool_operator.k8s.client import Manifest

BAD = sorted((Path(__file__).parents[1] / "bad_tenants").glob("*.yaml"))
SCHEMA = crdgen.crd(TENANT)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
NOW = "2026-11-20T10:00:00Z"


def tenant(name: str, *namespaces: str, age: int = 0, labels: dict[str, str] | None = None, **spec: Any) -> Manifest:
    """A KVCacheTenant; the higher `age`, the older."""
    members: dict[str, Any] = {"namespaces": list(namespaces)}
    if labels:
        members["selector"] = {"matchLabels": labels}
    return {
        "apiVersion": "kvpool.dev/v1alpha1",
        "kind": "KVCacheTenant",
        "metadata": {
            "name": name,
            "namespace": "kvpool-system",
            "uid": f"uid-of-{name}",
            "generation": 2,
            "creationTimestamp": f"2026-11-20T{20 - age:02}:00:00Z",
        },
        "spec": {"poolRef": {"name": "chat"}, "members": members, **spec},
    }


# -- the API ----------------------------------------------------------------------------------------------------------


def messages(node: Any) -> set[str]:
    if isinstance(node, list):
        return set().union(*map(messages, node))
    if not isinstance(node, dict):
        return set()
    own = {rule["message"] for rule in node.get("x-kubernetes-validations", [])}
    return own.union(*(messages(child) for child in node.values()))


@pytest.mark.parametrize("path", BAD, ids=lambda p: p.stem)
def test_a_bad_tenant_is_refused_with_the_same_sentence_everywhere(path: Path):
    case = yaml.safe_load(path.read_text())
    with pytest.raises(InvalidPoolError) as refused:
        KVCacheTenant.parse(case["tenant"])
    assert case["message"] in str(refused.value)
    if path.stem != "priority_absurd":  # a bound of the schema
        assert any(case["message"] in m for m in messages(SCHEMA))


def test_every_rule_of_the_kind_has_a_bad_example_or_is_about_a_change():
    shown = [yaml.safe_load(p.read_text())["message"] for p in BAD]
    assert not {m for m in messages(SCHEMA) if not any(s in m for s in shown) and "cannot be changed" not in m}


def test_the_example_is_valid():
    parts = list(yaml.safe_load_all((Path(__file__).parents[3] / "examples" / "multi-tenant.yaml").read_text()))
    tenants = [KVCacheTenant.parse(p) for p in parts if p["kind"] == "KVCacheTenant"]
    read = {one.name: one.reads_from for one in resolve([t for t in parts if t["kind"] == "KVCacheTenant"], {}, ["*"])}
    assert read == {"acme": ("common",), "trials": ("common",), "common": ()}
    assert len(tenants) == 3


# -- whose a namespace is ----------------------------------------------------------------------------------------------


def names(settled: Any) -> dict[str, tuple[str, ...]]:
    return {one.name: one.namespaces for one in settled}


def test_members_by_name_and_by_label():
    labels = {"acme-dev": {"team": "acme"}, "acme-prod": {"team": "acme"}, "other": {}}
    settled = resolve([tenant("acme", "acme-lab", labels={"team": "acme"})], labels, ["*"])
    assert names(settled) == {"acme": ("acme-dev", "acme-lab", "acme-prod")}
    assert settled[0].reason == "Accepted"


def test_the_older_of_two_that_claim_a_namespace_has_it():
    younger, older = tenant("aaa", "both", "mine"), tenant("zzz", "both", "its", age=3)
    for order in ([younger, older], [older, younger]):
        settled = resolve(order, {}, ["*"])
        assert names(settled) == {"zzz": ("both", "its"), "aaa": ("mine",)}
        assert {one.name: one.reason for one in settled} == {"zzz": "Accepted", "aaa": "NamespaceConflict"}
        assert "both (of zzz)" in settled[1].message


def test_a_tenant_gives_no_access_that_the_pool_does_not_give():
    (one,) = resolve([tenant("acme", "in", "out")], {}, ["in", "kvpool-system"])
    assert one.namespaces == ("in",)
    assert one.reason == "NamespaceNotAllowed"
    assert "out" in one.message


def test_one_that_cannot_be_understood_or_is_going_has_no_members():
    wrong, going = tenant("wrong", "a", priority="high"), tenant("going", "b")
    going["metadata"]["deletionTimestamp"] = NOW
    settled = resolve([wrong, going, tenant("fine", "a", "b")], {}, ["*"])
    assert names(settled) == {"wrong": (), "fine": ("a", "b")}
    assert [one.reason for one in settled if one.name == "wrong"] == ["InvalidSpec"]


NAMESPACES = st.lists(st.sampled_from("abcdef"), min_size=1, max_size=5, unique=True)


@given(st.lists(st.tuples(NAMESPACES, st.integers(0, 3)), max_size=6), st.sampled_from([["*"], ["a", "b", "c"]]))
def test_a_namespace_is_of_one_tenant_at_most_and_admitted(claims: list[Any], allowed: list[str]):
    raws = [tenant(f"t{n}", *namespaces, age=age) for n, (namespaces, age) in enumerate(claims)]
    settled = resolve(raws, {}, allowed)
    members = [namespace for one in settled for namespace in one.namespaces]
    assert len(members) == len(set(members))
    assert "*" in allowed or set(members) <= set(allowed)
    claimed = {namespace for namespaces, _ in claims for namespace in namespaces}
    assert set(members) == (claimed if "*" in allowed else claimed & set(allowed))
    made = to_configs(settled, pool().spec)
    assert loads(PoolConfig, _dumps(made)).tenants == made


def _dumps(tenants: tuple[TenantConfig, ...]) -> str:
    from kvpool_operator.desired.configmap import configmap

    return str(configmap(Inputs(pool(), ENV, SECRET, tenants=tenants))["data"]["pool.json"])


def test_what_a_tenant_leaves_out_is_the_pools():
    spec = pool(tenancy={"defaultQuota": {"capacity": "10Gi"}}, cache={"ttl": {"idle": "1h", "maxAge": "24h"}}).spec
    own = {"quota": {"capacity": "1Gi", "sharedCapacity": "0"}, "ttl": {"idle": "0s"}, "priority": -3}
    plain, other = to_configs(resolve([tenant("a", "x"), tenant("b", "y", **own)], {}, ["*"]), spec)
    assert plain == TenantConfig("a", "kvt:a:uid-of-a", ("x",), 10 << 30, 10 << 30, 3600, 86400, 0)
    assert other == TenantConfig("b", "kvt:b:uid-of-b", ("y",), 1 << 30, 0, 0, 86400, -3)


# -- who may read whom -------------------------------------------------------------------------------------------------


def letting(name: str, *readers: str, age: int = 0) -> Manifest:
    return tenant(name, f"ns-{name}", age=age, sharing={"readers": list(readers)})


def grants(*raws: Manifest) -> dict[str, tuple[str, ...]]:
    return {one.name: one.reads_from for one in resolve(raws, {}, ["*"]) if one.reads_from}


def test_a_tenant_lets_others_read_one_way_only():
    a, b, c = tenant("a", "x"), tenant("b", "y"), letting("c", "a")
    settled = resolve([a, b, c], {}, ["*"])
    assert {one.name: (one.reads_from, one.readers) for one in settled} == {
        "a": (("c",), ()),
        "b": ((), ()),
        "c": ((), ("a",)),
    }
    assert {one.reason for one in settled} == {"Accepted"}
    made = {config.name: config.reads_from for config in to_configs(settled, pool().spec)}
    assert made == {"a": ("kvt:c:uid-of-c",), "b": (), "c": ()}


def test_a_star_is_every_other_tenant_of_the_pool():
    assert grants(tenant("a", "x"), tenant("b", "y"), letting("c", "*")) == {"a": ("c",), "b": ("c",)}
    assert grants(letting("a", "*"), letting("b", "*")) == {"a": ("b",), "b": ("a",)}


def test_a_name_that_nobody_has_is_told_and_the_rest_works():
    settled = resolve([letting("a", "b", "gone", "never"), tenant("b", "y")], {}, ["*"])
    owner, reader = settled
    assert (owner.reason, reader.reason) == ("ReaderNotFound", "Accepted")
    assert "gone, never" in owner.message
    assert reader.reads_from == ("a",)
    assert owner.namespaces == ("ns-a",)
    both = resolve([letting("a", "gone"), tenant("b", "z", age=3)], {}, ["none"])
    reasons = {one.name: (one.reason, one.message) for one in both}
    assert reasons["a"][0] == "NamespaceNotAllowed"  # the graver of the two
    assert "not admitted" in reasons["a"][1]
    assert "gone" in reasons["a"][1]


def test_a_tenant_that_cannot_be_understood_or_goes_lets_nobody_read_and_reads_nobody():
    wrong, going = letting("wrong", "a"), letting("going", "a")
    wrong["spec"]["priority"] = "high"
    going["metadata"]["deletionTimestamp"] = NOW
    settled = resolve([wrong, going, letting("a", "wrong", "going")], {}, ["*"])
    assert not any(one.reads_from or one.readers for one in settled)
    (reported,) = [one for one in settled if one.name == "a"]
    assert (reported.reason, "going" in reported.message, "wrong" in reported.message) == (
        "ReaderNotFound",
        True,
        False,
    )


def test_at_most_eight_are_read_the_oldest_first():
    owners = [letting(f"o{n}", "r", age=n) for n in range(11)]
    settled = {one.name: one for one in resolve([*owners, tenant("r", "x")], {}, ["*"])}
    assert settled["r"].reads_from == tuple(f"o{n}" for n in range(10, 2, -1))
    assert settled["r"].reason == "TooManyGrants"
    assert "o2, o1, o0" in settled["r"].message
    assert [settled[f"o{n}"].readers for n in (2, 3)] == [(), ("r",)]
    (config,) = [c for c in to_configs(settled.values(), pool().spec) if c.name == "r"]
    assert config.reads_from[0] == "kvt:o10:uid-of-o10"


@given(
    st.lists(st.tuples(st.sampled_from([[], ["*"], None]), st.sets(st.integers(0, 12)), st.integers(0, 3)), max_size=12)
)
def test_nobody_reads_whom_it_was_not_let(claims: list[Any]):
    raws, lets = [], {}
    for n, (star, some, age) in enumerate(claims):
        readers = [f"t{m}" for m in sorted(some - {n})] if star is None else star
        raws.append(letting(f"t{n}", *readers, age=age))
        lets[f"t{n}"] = {f"t{m}" for m in range(len(claims))} if readers == ["*"] else set(readers)
    settled = resolve(raws, {}, ["*"])
    configs = {config.id: config for config in to_configs(settled, pool().spec)}
    for one in settled:
        may = {name for name, readers in lets.items() if one.name in readers and name != one.name}
        assert set(one.reads_from) <= may
        assert len(one.reads_from) == min(len(may), 8)
        its = configs[f"kvt:{one.name}:uid-of-{one.name}"]
        assert [configs[i].name for i in its.reads_from] == list(one.reads_from)
        assert all(one.name in other.readers for other in settled if other.name in one.reads_from)


def test_a_namesake_that_comes_later_is_another_tenant():
    first, second = tenant("acme", "x"), tenant("acme", "y")
    second["metadata"]["uid"] = "another"
    one, two = (to_configs(resolve([raw], {}, ["*"]), pool().spec)[0].id for raw in (first, second))
    assert one != two


# -- what needs a roll ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec",
    [
        {"tiers": [{"name": "nvme", "local": {"path": "/mnt/nvme/kv", "capacity": "1Gi", "reserveFree": "9%"}}]},
        {"cache": {"eviction": {"policy": "LRU", "highWatermark": 60, "lowWatermark": 50}}},
        {"cache": {"ttl": {"idle": "1h"}, "pinning": {"capacityPercent": 5}}},
        {"tenancy": {"defaultQuota": {"capacity": "1Gi"}}},
        {"injection": {"allowedNamespaces": {"from": "Same"}}},
    ],
    ids=lambda spec: "-".join(spec),
)
def test_what_sidecars_take_as_they_run_does_not_roll_them(spec: dict[str, Any]):
    before, after = Inputs(pool(), ENV, SECRET), Inputs(pool(**spec), ENV, SECRET, allowed_namespaces=("a",))
    assert before.config.restart_digest == after.config.restart_digest
    assert before.config.digest != after.config.digest


def test_tenants_roll_nothing_and_what_cannot_be_taken_does():
    before = Inputs(pool(), ENV, SECRET)
    tenants = to_configs(resolve([tenant("a", "x")], {}, ["*"]), pool().spec)
    assert before.config.restart_digest == Inputs(pool(), ENV, SECRET, tenants=tenants).config.restart_digest
    for spec in ({"transport": {"streams": 3}}, {"cache": {"write": {"policy": "LocalOnly"}}}):
        assert before.config.restart_digest != Inputs(pool(**spec), ENV, SECRET).config.restart_digest


# -- status ------------------------------------------------------------------------------------------------------------


def reported(status: Manifest, kind: str) -> tuple[str, str]:
    condition = find(status["conditions"], kind)
    assert condition is not None
    assert condition["message"]
    return condition["status"], condition["reason"]


TAG = tenant_tag(SECRET.pool_secret.encode(), "kvt:acme:uid-of-acme").hex()


def status(*reports: SidecarStatus, raw: Manifest | None = None, **spec: Any) -> Manifest:
    (one,) = resolve([raw or tenant("acme", "x", "y")], {}, ["*"])
    made = tenant_status(one, pool(**spec).spec, reports, "now", SECRET.pool_secret, NOW)
    schema = SCHEMA["properties"]["status"]["properties"]
    assert set(made) <= set(schema)
    assert set(made["used"]) <= set(schema["used"]["properties"])
    return made


def test_a_status_adds_up_what_the_nodes_say():
    one = SidecarStatus(
        config="now", tenants={TAG: ReportedTenantUsage(1 << 30, 30, 2), "other": ReportedTenantUsage(5, 5, 5)}
    )
    two = SidecarStatus(config="now", tenants={TAG: ReportedTenantUsage(1 << 30, 34, 3)}, shared_tenants={TAG: 3 << 30})
    made = status(one, two)
    assert made["used"] == {"nodes": "2Gi", "blocks": 64, "shared": "3Gi", "evictedOverQuota": 5}
    assert (made["memberCount"], made["members"], made["tag"]) == (2, ["x", "y"], TAG)
    assert reported(made, "Accepted") == ("True", "Accepted")
    assert reported(made, "Enforced") == ("True", "Applied")


def test_enforced_says_how_many_nodes_keep_to_it():
    assert reported(status(SidecarStatus(config="now"), SidecarStatus(config="before")), "Enforced") == (
        "False",
        "RollingOut",
    )
    assert reported(status(), "Enforced") == ("Unknown", "StatusUnavailable")
    assert reported(status(SidecarStatus(config="now"), mode="Paused"), "Enforced") == ("Unknown", "Paused")
    wrong = tenant("acme", "x", priority="high")
    made = status(SidecarStatus(config="now"), raw=wrong)
    assert reported(made, "Accepted") == reported(made, "Enforced") == ("False", "InvalidSpec")
    assert made["tag"] == ""


# -- whole passes ------------------------------------------------------------------------------------------------------


class World:
    """A pool without nodes, and tenants."""

    def __init__(
        self, *tenants: Manifest, namespaces: dict[str, dict[str, str]] | None = None, orders: Any = None
    ) -> None:
        self.reported: dict[str, SidecarStatus] = {}
        self.cluster = MemoryCluster()
        for name, labels in {"kvpool-system": {}, **(namespaces or {})}.items():
            metadata = {"name": name, "labels": labels}
            self.cluster.put({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
        self.cluster.put(pool_manifest(preflight="Skip"))
        for raw in tenants:
            self.cluster.put(raw)
        self.clock = 0.0
        image, clock = ENV.sidecar_image, lambda: self.clock
        config = ObserverConfig(sidecar_image=image, namespace="kvpool-system", webhook="w")
        observer = Observer(self.cluster, self, listers(self.cluster), config, clock)
        now = datetime(2026, 11, 20, 10, tzinfo=UTC)
        reloads = None if orders is None else ConfigPusher(orders, clock=clock)
        self.reconciler = PoolReconciler(
            PoolDependencies(self.cluster, observer, ENV, clock=clock, now=lambda: now, config_pusher=reloads)
        )

    async def get_all(self, addresses: Any, port: int) -> dict[str, SidecarStatus]:
        return {address: self.reported[address] for address in addresses if address in self.reported}

    def sidecar(self, node: str, report: SidecarStatus) -> None:
        """A pod of the pool's that says this of itself."""
        address = f"10.0.0.{len(self.reported) + 1}"
        self.reported[address] = report
        labels = {"kvpool.dev/pool": "chat", "app.kubernetes.io/component": "sidecar"}
        metadata = {"name": f"chat-sidecar-{node}", "namespace": "kvpool-system", "labels": labels}
        status = {"phase": "Running", "podIP": address, "conditions": [{"type": "Ready", "status": "True"}]}
        manifest = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"nodeName": node}}
        self.cluster.put(manifest | {"status": status})

    async def get_raw(self, addresses: Any, port: int) -> dict[str, Any]:
        return {}

    async def settle(self) -> None:
        for _ in range(3):
            self.clock += 100
            await self.reconciler.reconcile("kvpool-system", "chat")

    def status_of(self, name: str) -> Manifest:
        found: Manifest = self.cluster.objects[ObjectRef("KVCacheTenant", "kvpool-system", name)]["status"]
        return found

    @property
    def config(self) -> PoolConfig:
        text = self.cluster.objects[ObjectRef("ConfigMap", "kvpool-system", "chat-config")]["data"]["pool.json"]
        assert digest(text)
        return loads(PoolConfig, text)


async def test_tenants_come_into_the_configuration_and_get_a_status():
    world = World(tenant("acme", labels={"team": "acme"}), namespaces={"a": {"team": "acme"}, "b": {}})
    await world.settle()
    assert [t.namespaces for t in world.config.tenants] == [("a",)]
    assert world.status_of("acme")["members"] == ["a"]
    assert reported(world.status_of("acme"), "Accepted") == ("True", "Accepted")
    world.cluster.calls.clear()
    await world.settle()
    assert world.cluster.writes() == []


async def test_a_grant_comes_into_the_configuration_is_told_and_goes_with_who_gave_it():
    world = World(tenant("acme", "a"), letting("common", "acme"))
    await world.settle()
    assert {t.name: t.reads_from for t in world.config.tenants} == {"acme": ("kvt:common:uid-of-common",), "common": ()}
    assert (world.status_of("acme")["readsFrom"], world.status_of("common")["readers"]) == (["common"], ["acme"])
    schema = SCHEMA["properties"]["status"]["properties"]
    assert set(world.status_of("acme")) <= set(schema)
    again = letting("common", "acme")
    again["metadata"]["uid"] = "another"
    world.cluster.put(again)
    await world.settle()
    assert world.config.tenants[0].reads_from == ("kvt:common:another",)  # the grant names whoever has the name
    del world.cluster.objects[ObjectRef("KVCacheTenant", "kvpool-system", "common")]
    await world.settle()
    assert [t.reads_from for t in world.config.tenants] == [()]
    assert world.status_of("acme")["readsFrom"] == []


async def test_a_tenant_without_its_pool_says_so():
    world = World(tenant("acme", "a"))
    await world.settle()
    del world.cluster.objects[ObjectRef("KVCachePool", "kvpool-system", "chat")]
    await world.settle()
    assert reported(world.status_of("acme"), "Accepted") == ("False", "PoolNotFound")
    assert world.status_of("acme")["members"] == []


async def test_a_tenant_of_another_pool_is_not_this_pools():
    world = World(tenant("acme", "a") | {"spec": {"poolRef": {"name": "other"}, "members": {"namespaces": ["a"]}}})
    await world.settle()
    assert world.config.tenants == ()


class Orders:
    """Commands that note what is ordered; those in `deaf` do not answer."""

    def __init__(self) -> None:
        self.deaf: set[str] = set()
        self.given: list[tuple[str, str, dict[str, Any]]] = []

    async def start(
        self, pool: Any, to: SidecarAddress, name: str, kind: str, params: dict[str, Any]
    ) -> OperationProgress:
        self.given.append((to.node, kind, params))
        if to.node in self.deaf:
            raise SidecarUnavailableError("no answer")
        return OperationProgress("Running")

    async def poll(self, *_: Any) -> None:
        raise AssertionError

    cancel = poll


async def test_sidecars_that_run_another_configuration_are_brought_the_new_one_and_not_all_the_time():
    orders, now = Orders(), [0.0]
    orders.deaf.add("deaf")
    reloads = ConfigPusher(orders, clock=lambda: now[0])
    sidecars = [
        Sidecar("behind", True, "", SidecarStatus(config="before"), "10.0.0.1"),
        Sidecar("there", True, "", SidecarStatus(config="now"), "10.0.0.2"),
        Sidecar("old", True, "", SidecarStatus(), "10.0.0.3"),  # a version that does not report it
        Sidecar("silent", True, "", None, "10.0.0.4"),
        Sidecar("deaf", True, "", SidecarStatus(config="before"), "10.0.0.5"),
    ]
    seen = Snapshot(raw=pool_manifest(), sidecars=tuple(sidecars))

    async def push(text: str = "{}", its_digest: str = "now") -> list[str]:
        orders.given.clear()
        await reloads.push("kvpool-system/chat", seen, SECRET, text, its_digest)
        assert all((kind, params) == ("reload", {"config": text}) for _, kind, params in orders.given)
        return sorted(node for node, _, _ in orders.given)

    assert await push() == ["behind", "deaf"]
    assert await push() == []
    now[0] += 11
    assert await push() == ["behind", "deaf"]
    assert await push(its_digest="newer") == ["behind", "deaf", "there"]
    reloads.forget("kvpool-system/chat")
    assert await push("x" * 100_000) == []
    assert await push() == ["behind", "deaf"]


async def test_what_is_not_in_the_configmap_is_brought_to_nobody():
    orders = Orders()
    world = World(tenant("acme", "a"), orders=orders)
    world.sidecar("node-a", SidecarStatus(config="another"))
    await world.settle()
    text = world.cluster.objects[ObjectRef("ConfigMap", "kvpool-system", "chat-config")]["data"]["pool.json"]
    assert [(node, params["config"] == text) for node, _, params in orders.given] == [("node-a", True)] * 3
    orders.given.clear()
    world.cluster.refuse["ConfigMap"] = RejectedError("forbidden", 403)
    world.cluster.put(tenant("other", "b"))
    await world.settle()
    assert orders.given == []
