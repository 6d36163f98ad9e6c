"""The managed index: its size, its probes, its password, and the way to another index and back."""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import Any

import pytest
from op_pool_world import GOOD, NS, World
from op_samples import ENV, SECRET, inputs, pool

from kvpool.protocol.keys import index_login
from kvpool_operator.desired import Inputs, build
from kvpool_operator.desired.index import current_index_memory, index_memory
from kvpool_operator.k8s.client import ObjectRef

MIB, GIB = 2**20, 2**30
SECRET_REF, INDEX = ObjectRef("Secret", NS, "chat-secret"), ObjectRef("StatefulSet", NS, "chat-index")
SIDECARS = ObjectRef("DaemonSet", NS, "chat-sidecar")


def local(capacity: str, name: str = "nvme") -> dict[str, Any]:
    return {"name": name, "local": {"path": f"/mnt/{name}/kv", "capacity": capacity}}


def index_of(some: Inputs) -> dict[str, Any]:
    found: dict[str, Any] = next(m for m in build(some) if m["kind"] == "StatefulSet")
    return found


@pytest.mark.parametrize(
    ("capacity", "nodes", "present", "expected"),
    [
        ("1Gi", 0, 0, 64 * MIB),  # 4 nodes x 1024 blocks x 110 bytes
        ("148Gi", 4, 0, 64 * MIB),  # 4 x 151,552 x 110 = 66.7 million, below 67.1 million
        ("150Gi", 4, 0, 256 * MIB),
        ("148Gi", 5, 0, 256 * MIB),
        ("1Ti", 10, 0, 4 * GIB),  # 10 x 1,048,576 x 110 = 1.15 thousand million, beyond 1Gi
        ("1Pi", 1000, 0, 16 * GIB),
        ("1Gi", 4, 256 * MIB, 256 * MIB),  # a node less does not start the index again
        ("1Gi", 4, GIB, 64 * MIB),
        ("1Gi", 4, 100 * MIB, 64 * MIB),  # what was asked for once is no step
        ("148Gi", 5, 64 * MIB, 256 * MIB),
    ],
)
def test_memory_follows_from_the_capacity_of_the_nodes(capacity: str, nodes: int, present: int, expected: int):
    assert index_memory(pool(tiers=[local(capacity)]), nodes, present) == expected


def test_memory_that_is_asked_for_is_given_in_whole_mebibytes():
    asked = pool(index={"managed": {"maxMemory": "20M"}})
    assert index_memory(asked, 1000, 0) == 20 * MIB  # 19.07
    assert index_memory(pool(tiers=[local("75Gi"), local("75Gi", "b")]), 4, 0) == 256 * MIB


def test_what_was_given_can_be_read_from_the_index():
    some = inputs(tiers=[local("150Gi")])
    made = index_of(some)
    assert current_index_memory(made) == 256 * MIB
    assert str(256 * MIB) in made["spec"]["template"]["spec"]["containers"][0]["command"]
    limit = made["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]["memory"]
    assert limit == f"{256 * 5 // 4 + 160}Mi"
    assert (
        current_index_memory(None)
        == current_index_memory({"metadata": {"annotations": {"kvpool.dev/index-memory": "x"}}})
        == 0
    )


def test_probes_count_a_server_that_loads_as_alive_and_give_it_time():
    container = index_of(inputs())["spec"]["template"]["spec"]["containers"][0]
    port = next(p for p in container["ports"] if p["name"] == "probes")["containerPort"]
    assert str(port) == container["command"][container["command"].index("--http-port") + 1]
    probes = {k: container[k] for k in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert {k: p["httpGet"]["path"] for k, p in probes.items()} == {
        "startupProbe": "/healthz",
        "readinessProbe": "/readyz",
        "livenessProbe": "/healthz",
    }
    startup = probes["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 600


def test_persistence_is_a_claim_that_the_index_mounts_and_keeps_its_entries_in():
    plain = {(m["kind"], m["metadata"]["name"]) for m in build(inputs())}
    kept = inputs(index={"managed": {"persistence": {"size": "2Gi", "storageClassName": "fast"}}})
    made = {(m["kind"], m["metadata"]["name"]): m for m in build(kept)}
    assert set(made) - plain == {("PersistentVolumeClaim", "chat-index")}
    claim = made["PersistentVolumeClaim", "chat-index"]["spec"]
    assert (claim["storageClassName"], claim["resources"]["requests"]["storage"]) == ("fast", "2Gi")
    spec = made["StatefulSet", "chat-index"]["spec"]["template"]["spec"]
    assert {"name": "data", "persistentVolumeClaim": {"claimName": "chat-index"}} in spec["volumes"]
    assert "--persist" in spec["containers"][0]["command"]
    assert "--persist" not in index_of(inputs())["spec"]["template"]["spec"]["containers"][0]["command"]
    no_class = build(inputs(index={"managed": {"persistence": {}}}))
    assert "storageClassName" not in next(m for m in no_class if m["kind"] == "PersistentVolumeClaim")["spec"]


def test_a_password_starts_nothing_anew():
    """Neither the index nor a sidecar: their pods are the same, whatever the password is."""
    other = replace(SECRET, managed_index_password="another", managed_index_previous="redis-password")
    for kind in ("StatefulSet", "DaemonSet"):
        before = next(m for m in build(Inputs(pool(), ENV, SECRET)) if m["kind"] == kind)
        assert next(m for m in build(Inputs(pool(), ENV, other)) if m["kind"] == kind) == before


def data(world: World) -> dict[str, str]:
    return {k: base64.b64decode(v).decode() for k, v in world.cluster.objects[SECRET_REF]["data"].items()}


def login(world: World, key: str = "managed-index-password") -> str:
    return index_login(data(world)["pool-secret"].encode(), data(world)[key])


def show(world: World, *logins: str) -> None:
    for i, reported in enumerate(logins):
        world.reports.reported[f"10.0.0.{i}"] = replace(GOOD, index_login=reported)


def ask_for(world: World, revision: int) -> None:
    world.pool["spec"]["index"] = {"managed": {"passwordRevision": revision}}
    world.pool["metadata"]["generation"] += 1


async def test_the_old_password_goes_when_every_sidecar_has_shown_the_new_one():
    world = World()
    await world.settle()
    world.run()
    await world.settle()
    first = data(world)["managed-index-password"]
    assert data(world)["managed-index-previous"] == ""
    show(world, login(world), login(world))
    before = {r: world.cluster.objects[r]["metadata"]["resourceVersion"] for r in (INDEX, SIDECARS)}
    ask_for(world, 1)
    await world.settle()
    second = data(world)["managed-index-password"]
    assert second != first
    assert data(world)["managed-index-previous"] == first
    assert world.pool["status"]["index"]["password"] == "node-0; node-1"
    show(world, login(world), login(world, "managed-index-previous"))
    for _ in range(4):  # it is among what is written twice a minute
        await world.look()
    assert data(world)["managed-index-previous"] == first
    assert world.pool["status"]["index"]["password"] == "node-1"
    ask_for(world, 2)  # one at a time
    await world.settle()
    assert data(world)["managed-index-password"] == second
    del world.reports.reported["10.0.0.1"]  # it does not answer: it may know only the old one
    await world.settle()
    assert data(world)["managed-index-previous"] == first
    show(world, login(world), login(world))
    ask_for(world, 1)
    for _ in range(4):
        await world.look()
    assert (data(world)["managed-index-password"], data(world)["managed-index-previous"]) == (second, "")
    assert world.pool["status"]["index"]["password"] == ""
    assert {r: world.cluster.objects[r]["metadata"]["resourceVersion"] for r in before} == before
    assert second not in str({r: o for r, o in world.cluster.objects.items() if r.kind != "Secret"})


async def test_a_young_pool_begins_with_the_revision_it_asks_for():
    world = World(index={"managed": {"passwordRevision": 7}})
    await world.settle()
    assert (data(world)["managed-index-revision"], data(world)["managed-index-previous"]) == ("7", "")


async def test_without_any_sidecar_both_passwords_stay_good():
    """Nobody could tell whether the index has taken the new one."""
    world = World()
    await world.settle()
    ask_for(world, 1)
    await world.settle()
    assert data(world)["managed-index-previous"]


async def test_the_managed_index_stays_until_the_last_sidecar_uses_the_other_one():
    world = World()
    await world.settle()
    world.run()
    await world.settle()
    url = base64.b64encode(b"redis://me:secret@redis.example:6379/0").decode()
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "redis", "namespace": NS},
        "data": {"url": url},
    }
    world.cluster.put(secret)
    world.pool["spec"]["index"] = {"external": {"urlSecretRef": {"name": "redis"}}}
    world.pool["metadata"]["generation"] += 1
    await world.look()
    world.cluster.objects[SIDECARS]["status"]["updatedNumberScheduled"] = 1
    for _ in range(3):
        await world.look()
    assert INDEX in world.cluster.objects
    assert "other index" in world.condition("Progressing")["message"]
    assert "managed-index-password" in data(world)
    assert data(world)["index-password"] == "secret"
    world.run()
    await world.settle()
    assert INDEX not in world.cluster.objects
    assert ObjectRef("Service", NS, "chat-index") not in world.cluster.objects
    # and back: the index is there before the first sidecar needs it, and the other password goes with the last
    world.pool["spec"]["index"] = {"managed": {}}
    await world.look()
    assert INDEX in world.cluster.objects
    assert "index-password" not in data(world)
    volume = next(
        v for v in world.cluster.objects[SIDECARS]["spec"]["template"]["spec"]["volumes"] if v["name"] == "secret"
    )
    assert {"key": "managed-index-password", "path": "index-password"} in volume["secret"]["items"]


async def test_a_changed_secret_of_an_index_of_ones_own_reaches_the_sidecars_and_rolls_nothing():
    world = World(index={"external": {"urlSecretRef": {"name": "redis"}, "passwordSecretRef": {"name": "redis"}}})

    def put(password: bytes) -> None:
        values = {"url": b"redis://me@redis.example:6379/0", "password": password}
        coded = {k: base64.b64encode(v).decode() for k, v in values.items()}
        metadata = {"name": "redis", "namespace": NS}
        world.cluster.put({"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": coded})

    put(b"one")
    await world.settle()
    world.run()
    await world.settle()
    before = world.cluster.objects[SIDECARS]["metadata"]["resourceVersion"]
    put(b"two")
    await world.settle()
    assert data(world)["index-password"] == "two"
    assert world.cluster.objects[SIDECARS]["metadata"]["resourceVersion"] == before


def secret_items(manifest: dict[str, Any]) -> dict[str, str]:
    """Key of the Secret by the file that it becomes."""
    volumes = manifest["spec"]["template"]["spec"]["volumes"]
    items = next(v for v in volumes if v["name"] == "secret")["secret"]["items"]
    return {i["path"]: i["key"] for i in items}


async def test_an_encrypted_index_gets_a_certificate_and_sidecars_its_ca_and_no_key():
    world = World(index={"managed": {"encryption": "Always"}})
    await world.settle()
    command = world.cluster.objects[INDEX]["spec"]["template"]["spec"]["containers"][0]["command"]
    assert "--tls" in command
    server, sidecar = secret_items(world.cluster.objects[INDEX]), secret_items(world.cluster.objects[SIDECARS])
    assert {"index-server.crt", "index-server.key"} <= server.keys()
    assert "index-ca.crt" in sidecar
    assert not {"index-server.key", "index-server.crt"} & sidecar.keys()
    stored = data(world)
    assert all(stored[key] for key in (server["index-server.crt"], server["index-server.key"], sidecar["index-ca.crt"]))
    # the keys of the CA are mounted nowhere
    assert "managed-index-current.key" in stored
    assert "managed-index-current.key" not in {*server.values(), *sidecar.values()}
    config = world.cluster.objects[ObjectRef("ConfigMap", NS, "chat-config")]["data"]["pool.json"]
    assert "rediss://chat-index." in config
    assert "redis://" not in config


async def test_an_index_without_encryption_has_no_certificate():
    world = World()
    await world.settle()
    assert not [key for key in data(world) if key.endswith("server.key")]
    assert "--tls" not in world.cluster.objects[INDEX]["spec"]["template"]["spec"]["containers"][0]["command"]


async def test_a_pool_that_leaves_an_encrypted_index_keeps_its_files_for_the_sidecars_that_use_it():
    world = World(index={"managed": {"encryption": "Always"}})
    await world.settle()
    ca = data(world)["managed-index-ca.crt"]
    world.pool["spec"]["index"] = {"managed": {}}
    world.pool["metadata"]["generation"] += 1
    await world.settle()
    assert data(world)["managed-index-ca.crt"] == ca


def test_a_server_of_another_image_is_prepared_and_supervised_by_the_sidecar_image():
    env = replace(ENV, index_image="registry.example/valkey@sha256:" + "ab" * 32)
    made = index_of(replace(inputs(index={"managed": {"encryption": "Always", "persistence": {}}}), env=env))
    pod = made["spec"]["template"]["spec"]
    (prepare,), (server, supervisor) = pod["initContainers"], pod["containers"]
    assert (server["name"], server["image"]) == ("index", env.index_image)
    assert {prepare["image"], supervisor["image"]} == {ENV.sidecar_image}
    assert server["command"] == ["valkey-server", "/data/server.conf"]
    for container, stage in ((prepare, "prepare"), (supervisor, "supervise")):
        assert container["command"][:2] == ["kvpool-sidecar", "index-server"]
        assert container["command"][container["command"].index("--stage") + 1] == stage
        assert {"--tls", "--persist"} <= set(container["command"])
    # a server that hangs is restarted by its own probe, which the supervisor answers
    assert server["livenessProbe"]["httpGet"]["port"] == supervisor["ports"][0]["containerPort"] == 7424
    assert all(c["securityContext"] == server["securityContext"] for c in (prepare, supervisor))
    assert all(c["volumeMounts"] == server["volumeMounts"] for c in (prepare, supervisor))
    assert (
        server["resources"]
        == index_of(inputs(index={"managed": {"persistence": {}}}))["spec"]["template"]["spec"]["containers"][0][
            "resources"
        ]
    )
