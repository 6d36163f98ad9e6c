"""Keys of the encrypted shared tier: made once, kept, and forgotten with their tenant."""

from __future__ import annotations

import base64
import itertools
import json
from dataclasses import replace

import pytest
from op_pool_world import NS, World
from op_samples import ENV, LOCAL, SECRET, pool

from kvpool.protocol.keys import shared_key_id
from kvpool_operator.desired import Inputs, build
from kvpool_operator.desired.config import to_pool_config
from kvpool_operator.desired.secrets import read_secret
from kvpool_operator.desired.shared_keys import next_keys
from kvpool_operator.errors import InvalidPoolError
from kvpool_operator.k8s.client import ObjectRef

A, B = "kvt:a:1", "kvt:b:2"
NFS = {"name": "cold", "shared": {"nfs": {"server": "nfs", "path": "/kv"}, "capacity": "1Ti"}}
OBJECTS = {"name": "cold", "objectStore": {"url": "s3://bucket/kv", "capacity": "1Ti"}}


def source():
    numbers = itertools.count(1)
    return lambda: next(numbers).to_bytes(32, "big")


def parsed(text: str) -> dict:
    value = json.loads(text)
    assert all(shared_key_id(bytes.fromhex(key)).hex() == name for name, key in value["keys"].items())
    assert set(value["keys"]) == {value["default"], *value["tenants"].values()}
    return value


def test_every_tenant_and_the_others_get_a_key_of_their_own():
    value = parsed(next_keys("", [A, B], source()))
    assert set(value["tenants"]) == {A, B}
    assert len(value["keys"]) == 3


def test_keys_stay():
    generate = source()
    text = next_keys("", [A], generate)
    assert next_keys(text, [A], generate) == text
    later = parsed(next_keys(text, [A, B], generate))
    assert later["keys"].items() >= parsed(text)["keys"].items()
    assert later["tenants"][A] == parsed(text)["tenants"][A]


def test_the_key_of_a_deleted_tenant_is_forgotten():
    generate = source()
    text = next_keys("", [A, B], generate)
    key = parsed(text)["keys"][parsed(text)["tenants"][A]]
    after = next_keys(text, [B], generate)
    assert key not in after
    assert A not in after
    assert parsed(after)["tenants"] == {B: parsed(text)["tenants"][B]}
    assert parsed(next_keys(after, [A, B], generate))["tenants"][A] != parsed(text)["tenants"][A]


@pytest.mark.parametrize("text", ["{", "[]", '"x"', '{"keys": {"a": "b"}}', '{"keys": {"aa": "zz"}, "tenants": {}}'])
def test_a_malformed_file_is_replaced(text):
    assert len(parsed(next_keys(text, [A], source()))["keys"]) == 2


def encrypted(tier: dict, kind: str) -> dict:
    return {**tier, kind: {**tier[kind], "encryption": "AES256GCM"}}


@pytest.mark.parametrize(("tier", "kind"), [(NFS, "shared"), (OBJECTS, "objectStore")])
def test_sidecars_get_the_setting_and_the_file(tier, kind):
    secret = replace(SECRET, shared_keys=next_keys("", [], source()))
    for spec, expected in ((tier, "None"), (encrypted(tier, kind), "AES256GCM")):
        one = pool(tiers=[LOCAL, spec])
        config = to_pool_config(one, pool_id="id", index_url="")
        assert (config.shared or config.fsspec).encryption == expected
        manifests = build(Inputs(one, ENV, secret))
        daemonset = next(m for m in manifests if m["kind"] == "DaemonSet")
        volume = next(v for v in daemonset["spec"]["template"]["spec"]["volumes"] if v["name"] == "secret")
        item = {"key": "shared-keys.json", "path": "shared-keys.json"}
        assert (item in volume["secret"]["items"]) == (expected != "None")


def test_the_secret_keeps_them():
    text = next_keys("", [A], source())
    manifests = build(Inputs(pool(), ENV, replace(SECRET, shared_keys=text)))
    manifest = next(m for m in manifests if m["kind"] == "Secret")
    assert read_secret(manifest, SECRET).shared_keys == text
    without = next(m for m in build(Inputs(pool(), ENV, SECRET)) if m["kind"] == "Secret")
    assert "shared-keys.json" not in without["data"]
    assert text not in repr(replace(SECRET, shared_keys=text))


def test_an_unknown_encryption_is_refused():
    with pytest.raises(InvalidPoolError):
        pool(tiers=[LOCAL, {**NFS, "shared": {**NFS["shared"], "encryption": "ROT13"}}])


async def test_keys_come_with_the_setting_and_go_with_their_tenant():
    """From the pool to the Secret, through the operator."""
    world = World(tiers=[LOCAL, NFS])
    secret, tenant = ObjectRef("Secret", NS, "chat-secret"), ObjectRef("KVCacheTenant", NS, "acme")

    async def keys() -> dict | None:
        await world.settle()
        data = world.cluster.objects[secret]["data"].get("shared-keys.json")
        return None if data is None else parsed(base64.b64decode(data).decode())

    assert await keys() is None
    world.pool["spec"]["tiers"][1] = encrypted(NFS, "shared")
    first = await keys()
    assert first["tenants"] == {}
    world.cluster.put(
        {
            "apiVersion": "kvpool.dev/v1alpha1",
            "kind": "KVCacheTenant",
            "metadata": {"name": "acme", "namespace": NS, "uid": "9"},
            "spec": {"poolRef": {"name": "chat"}, "members": {"namespaces": ["team-a"]}},
        }
    )
    second = await keys()
    assert list(second["tenants"]) == ["kvt:acme:9"]
    assert second["default"] == first["default"]
    assert await keys() == second
    del world.cluster.objects[tenant]
    assert await keys() == first
    world.pool["spec"]["tiers"][1] = NFS
    assert await keys() == first, "earlier blocks stay readable if encryption is turned on again"
