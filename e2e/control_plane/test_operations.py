"""KVCacheOperations from the API server through the real operator to real sidecars, which keep real blocks."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any, Self

import pytest
import yaml
from api import APPLY, MERGE, POOLS, Api, ApiError, until
from conftest import NODES, ROOT, SYSTEM, Pools
from kubelet import address
from sidecars import sidecar_token

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

sys.path.append(str(ROOT / "sidecar" / "tests"))
from sc_raw import Raw, block_id, payload  # the protocol by hand

from kvpool.protocol.wire import Flag

pytestmark = pytest.mark.cluster

SIZE = 64 * 1024


class RealSidecar:
    """A sidecar's process at a node's address, with what the operator wrote for it."""

    def __init__(self, pools: Pools, pool: str, node: str, home: Path) -> None:
        self.node, self.home = node, home
        path = f"/api/v1/namespaces/{SYSTEM}"
        config = json.loads(pools.api.get(f"{path}/configmaps/{pool}-config")["data"]["pool.json"])
        config["local"][0] |= {"path": str(home / "nvme"), "reserve_free_percent": 0}
        config["index"]["url"] = ""  # there is no network to it here
        config["http_port"] = 0  # where the double tells of this node
        (home / "pool.json").write_text(json.dumps(config))
        secret = pools.api.get(f"{path}/secrets/{pool}-secret")["data"]
        (home / "secret").mkdir()
        for name, value in secret.items():
            (home / "secret" / name).write_bytes(base64.b64decode(value))
        (home / "token").write_text(sidecar_token(pools, pool, node))
        self._issuer = ["--issuer-url", pools.issuer_url, "--issuer-token", home / "token"]
        self.sockets = {tenant: home / f"{tenant}.sock" for tenant in ("team-a", "team-b")}
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        arguments = ["--config", self.home / "pool.json", "--secret-dir", self.home / "secret", "--node", self.node]
        arguments += [
            *self._issuer,
            "--address",
            address(self.node),
            *(f"--socket={p}={t}" for t, p in self.sockets.items()),
        ]
        with (self.home / "log").open("ab") as log:
            command = [sys.executable, "-m", "kvpool_sidecar", "serve", *map(str, arguments)]
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        until(f"the sidecar of {self.node} is there", self._listens)
        return self

    def _listens(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, (self.home / "log").read_text()[-3000:]
        try:
            self.connect("team-a").close()
        except OSError:
            return False
        return True

    def __exit__(self, *_: object) -> None:
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def connect(self, tenant: str) -> Raw:
        return Raw(self.sockets[tenant])

    def put(self, tenant: str, count: int, salt: str = "", first: int = 0) -> None:
        with self.connect(tenant) as one:
            one.put({block_id(n): payload(n, SIZE) for n in range(first, first + count)}, salt)

    def has(self, tenant: str, count: int, first: int = 0) -> int:
        with self.connect(tenant) as one:
            tiers = one.lookup([block_id(n) for n in range(first, first + count)], flags=Flag.EXHAUSTIVE)
            return sum(tier != 0 for tier in tiers)


class Ops:
    """What a user does with operations."""

    def __init__(self, api: Api) -> None:
        self.api = api

    def path(self, name: str) -> str:
        return f"{POOLS}/namespaces/{SYSTEM}/kvcacheoperations/{name}"

    def manifest(self, name: str, **spec: Any) -> dict[str, Any]:
        return {
            "apiVersion": "kvpool.dev/v1alpha1",
            "kind": "KVCacheOperation",
            "metadata": {"name": name, "namespace": SYSTEM},
            "spec": {"poolRef": {"name": "tidy"}, **spec},
        }

    def make(self, name: str, **spec: Any) -> None:
        self.api.call("PATCH", f"{self.path(name)}?fieldManager=user", self.manifest(name, **spec), APPLY)

    def status(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.api.get(self.path(name))["status"]
        return found

    def until_ended(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = until(
            f"{name} has ended", lambda: (s := self.status(name)).get("completionTime") and s, timeout=60
        )
        return found


@pytest.fixture
def ops(pools: Pools, api: Api) -> Iterator[Ops]:
    yield Ops(api)
    for one in api.items(f"{POOLS}/namespaces/{SYSTEM}/kvcacheoperations"):
        api.delete(f"{POOLS}/namespaces/{SYSTEM}/kvcacheoperations/{one['metadata']['name']}")
    until("every operation is gone", lambda: api.items(f"{POOLS}/kvcacheoperations") == [], timeout=60)


@pytest.fixture
def real(pools: Pools, tmp_path: Path) -> dict[str, RealSidecar]:
    return sidecars(pools, tmp_path)


def sidecars(pools: Pools, tmp_path: Path, **spec: Any) -> dict[str, RealSidecar]:
    """Of the pool `tidy`, by node; not started."""
    pools.apply("tidy", **spec)
    pools.until_ready("tidy")
    found = {}
    for node in NODES:
        (tmp_path / node).mkdir()
        found[node] = RealSidecar(pools, "tidy", node, tmp_path / node)
    return found


def test_a_tenant_is_purged_on_every_node_and_counted_in_the_results(ops: Ops, real: dict[str, RealSidecar]):
    with real["node-a"] as a, real["node-b"] as b:
        a.put("team-a", 5)
        a.put("team-b", 4)
        b.put("team-a", 3)
        ops.make("forget", purge={"tenant": "team-a"})
        status = ops.until_ended("forget")
        assert status["phase"] == "Succeeded", status
        assert status["nodes"]["summary"] == "2/2"
        assert status["results"]["local"] == {"blocks": 8, "bytes": 8 * (SIZE + 4096), "quarantined": 0}
        assert (a.has("team-a", 5), b.has("team-a", 3), a.has("team-b", 4)) == (0, 0, 4)
        ops.make("look", verify={"bandwidth": "1Gi"})
        assert ops.until_ended("look")["results"]["local"] == {
            "blocks": 4, "bytes": 4 * (SIZE + 4096), "corrupt": 0
        }  # fmt: skip
        with pytest.raises(ApiError, match="cannot be changed"):
            ops.api.call("PATCH", ops.path("forget"), {"spec": {"purge": {"tenant": "team-b"}}}, MERGE)
        assert a.has("team-b", 4) == 4


def test_a_salt_is_purged_on_every_node_by_its_digest(ops: Ops, pools: Pools, tmp_path: Path):
    real = sidecars(pools, tmp_path, tenancy={"saltTags": True})
    with real["node-a"] as a, real["node-b"] as b:
        for tenant in ("team-a", "team-b"):
            a.put(tenant, 3, "red")
        a.put("team-a", 2, "blue", first=10)
        a.put("team-a", 2, first=20)
        b.put("team-a", 4, "red")
        red = f"sha256:{hashlib.sha256(b'red').hexdigest()}"
        ops.make("forget", purge={"tenant": "team-a", "salts": [red]})
        status = ops.until_ended("forget")
        assert (status["phase"], status["message"]) == ("Succeeded", "every node finished"), status
        assert status["results"]["local"] == {"blocks": 7, "bytes": 7 * (SIZE + 4096), "quarantined": 0}
        assert (a.has("team-a", 3), b.has("team-a", 4)) == (0, 0)
        assert (a.has("team-b", 3), a.has("team-a", 2, 10), a.has("team-a", 2, 20)) == (3, 2, 2)


def test_a_node_that_does_not_answer_is_named_and_the_rest_is_done(ops: Ops, real: dict[str, RealSidecar]):
    with real["node-a"] as a:
        a.put("team-a", 2)
        ops.make("partly", purge={"tenant": "team-a"}, timeout="8s")
        status = ops.until_ended("partly")
        assert status["phase"] == "Failed"
        assert [f["node"] for f in status["failures"]] == ["node-b"]
        assert "does not answer" in status["failures"][0]["message"]
        assert a.has("team-a", 2) == 0


def test_one_that_is_deleted_is_cancelled_and_one_whose_time_has_come_goes(ops: Ops, real: dict[str, RealSidecar]):
    with real["node-a"] as a, real["node-b"]:
        a.put("team-a", 64)
        ops.make("slow", verify={"bandwidth": "1Mi"})
        until("it runs", lambda: ops.status("slow")["phase"] == "Running")
        ops.api.delete(ops.path("slow"))
        until("it is gone", lambda: ops.api.get(ops.path("slow")) is None)
        ops.make("brief", verify={"bandwidth": "1Gi"}, ttlSecondsAfterFinished=1)
        until("it has ended and is gone", lambda: ops.api.get(ops.path("brief")) is None, timeout=60)


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ({}, "set exactly one action"),
        ({"purge": {"all": True}, "verify": {}}, "set exactly one action"),
        ({"purge": {}}, "select the blocks"),
        ({"purge": {"all": True, "tenant": "a"}}, "select the blocks"),
        ({"purge": {"tenant": "A_b"}}, "name of a tenant"),
        ({"purge": {"fingerprint": "xyz"}}, "hexadecimal digits"),
        ({"purge": {"salts": ["red"]}}, "give the digest of a salt"),
        ({"purge": {"salts": []}}, "should have at least 1 items"),
        ({"purge": {"salts": [f"sha256:{n:064x}" for n in range(65)]}}, "must have at most 64 items"),
        ({"purge": {"salts": ["sha256:" + "0" * 64] * 2}}, "Duplicate value"),
        ({"purge": {"all": True, "salts": ["sha256:" + "0" * 64]}}, "select the blocks"),
        ({"purge": {"olderThan": "1y"}}, "give an age"),
        ({"warm": {"bandwidth": "1"}}, "bytes per second"),
        ({"verify": {}, "timeout": "0s"}, "give timeout"),
    ],
)
def test_a_bad_operation_is_refused_with_a_sentence_that_helps(api: Api, spec: dict[str, Any], sentence: str):
    url = f"{POOLS}/namespaces/{SYSTEM}/kvcacheoperations?dryRun=All&fieldValidation=Strict"
    with pytest.raises(ApiError) as refused:
        api.call("POST", url, Ops(api).manifest("bad", **spec))
    assert sentence in str(refused.value)
    assert refused.value.status == 422


def test_the_examples_are_accepted(api: Api):
    for manifest in yaml.safe_load_all((ROOT / "examples" / "operations.yaml").read_text()):
        url = f"{POOLS}/namespaces/{SYSTEM}/kvcacheoperations?dryRun=All&fieldValidation=Strict"
        made = api.call("POST", url, manifest)
        assert made["spec"]["timeout"]
