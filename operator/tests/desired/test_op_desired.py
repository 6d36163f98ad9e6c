"""What a pool becomes: golden manifests, and the properties that each of them must have."""

from __future__ import annotations

import base64
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import kubernetes_validate
import pytest
import yaml
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from op_samples import ENV, LOCAL, ROOT, SECRET, example, inputs, pool
from zmq.utils.z85 import encode

from kvpool.config import Deadlines, FsspecTier, HintsConfig, PoolConfig, loads
from kvpool.protocol.keys import events_curve_keys, events_token, hints_token
from kvpool_operator.api.crdgen import render
from kvpool_operator.api.quantity import to_bytes
from kvpool_operator.api.v1alpha1 import KVCachePool
from kvpool_operator.desired import ExternalIndexUrl, Inputs, InstallationConfig, build
from kvpool_operator.desired.config import to_client_config, to_pool_config
from kvpool_operator.desired.preflight import build_preflight
from kvpool_operator.desired.secrets import read_secret, secret
from kvpool_operator.desired.users import FIRST_USER, LAST_USER
from kvpool_operator.desired.wipe import build_cleanup, wipe_daemonset
from kvpool_operator.errors import InvalidPoolError
from kvpool_operator.k8s.client import KINDS, ref
from kvpool_operator.pki.curve import z85
from kvpool_operator.pools.secrets import generate_secret

if TYPE_CHECKING:
    from kvpool_operator.desired import Manifest

GOLDEN = ROOT / "operator" / "tests" / "golden"
NFS = {"name": "cold", "shared": {"nfs": {"server": "10.0.0.9", "path": "/kv"}, "capacity": "1Ti"}}
PVC = {"name": "cold", "shared": {"pvc": {"claimName": "kv"}, "capacity": "1Ti"}}

FULL = inputs(
    nodes={
        "selector": {
            "matchLabels": {"gpu": "true"},
            "matchExpressions": [
                {"key": "zone", "operator": "NotIn", "values": ["c"]},
                {"key": "a", "operator": "Exists"},
            ],
        },
        "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "priorityClassName": "system-node-critical",
    },
    tiers=[LOCAL, {"name": "second", "local": {"path": "/mnt/b", "capacity": "1Ti", "reserveFree": "50Gi"}}, NFS],
    index={"managed": {"maxMemory": "1Gi"}, "lookupTimeout": "10ms", "rebuildRate": 1000, "nodeExpiry": "10m"},
    events={"enabled": True, "port": 6557, "replayPort": 6558, "topic": "kv@{node}@llama", "hashes": "Int64"},
    transport={
        "port": 7500,
        "protocol": "RDMA",
        "rdma": {"resources": [{"name": "rdma/hca_shared_devices_a"}], "memory": "1Gi"},
    },
)
EXTERNAL = Inputs(
    pool(index={"external": {"urlSecretRef": {"name": "redis"}}}, tiers=[LOCAL, PVC]),
    InstallationConfig(sidecar_image="i", image_pull_secrets=("pull",)),
    SECRET,
    ("kvpool-system", "team-a"),
    ExternalIndexUrl(
        "rediss://r:6380/2",
        "me",
        "their-password",
        {"index-ca.crt": "their-ca", "index-client.crt": "their-cert", "index-client.key": "their-key"},
    ),
)
CLOSED = InstallationConfig(sidecar_image="i", network_policies=True, metrics_per_tenant=True)
CASES = {
    "minimal": build(Inputs(example("minimal.yaml"), ENV, SECRET)),
    "example": build(Inputs(example("kvcachepool.yaml"), ENV, SECRET, ("kvpool-system", "team-a"))),
    "full": build(FULL),
    "external": build(EXTERNAL),
    "preflight": build_preflight(EXTERNAL),
    "closed": build(Inputs(pool(events={"enabled": True}), CLOSED, SECRET)),
    "cleanup": build_cleanup(Inputs(example("kvcachepool.yaml"), ENV, SECRET)),
}


def find(manifests: list[Manifest], kind: str, name: str = "") -> Manifest:
    return next(m for m in manifests if m["kind"] == kind and name in m["metadata"]["name"])


def pods(manifests: list[Manifest]) -> list[tuple[str, Manifest]]:
    return [
        (m["metadata"]["name"], m["spec"]["template"]["spec"]) for m in manifests if "template" in m.get("spec", {})
    ]


@pytest.mark.parametrize("name", CASES)
def test_manifests_are_as_reviewed(name: str):
    text = "".join(f"---\n{render(m)}" for m in CASES[name])
    path = GOLDEN / f"{name}.yaml"
    if os.environ.get("KVPOOL_WRITE_GOLDEN"):
        path.write_text(text)
    assert path.read_text() == text, f"{path} differs: look at the change, then `make golden`"


def test_rdma_brings_its_device_and_its_memory_and_only_where_it_is_asked_for():
    def server(made: list[Manifest]) -> dict[str, Any]:
        pod = find(made, "DaemonSet")["spec"]["template"]["spec"]
        return next(c for c in pod["containers"] if c["name"] == "server")["resources"]

    plain, with_device = server(CASES["example"]), server(CASES["full"])
    assert with_device["limits"]["rdma/hca_shared_devices_a"] == "1"
    assert to_bytes(with_device["limits"]["memory"]) == (2 << 30) + (1 << 30) + (512 << 20)
    assert to_bytes(plain["limits"]["memory"]) == (2 << 30) + (512 << 20)
    assert set(plain["limits"]) == {"memory"}
    transport = {"protocol": "TCP", "rdma": {"resources": [{"name": "rdma/a"}]}}
    assert server(build(inputs(transport=transport))) == plain


def test_the_write_buffer_is_in_the_sidecars_memory():
    def server(cache: dict[str, Any]) -> dict[str, Any]:
        pod = find(build(inputs(cache=cache)), "DaemonSet")["spec"]["template"]["spec"]
        return next(c for c in pod["containers"] if c["name"] == "server")["resources"]

    assert server({"write": {"buffer": "2Gi"}}) == {
        "requests": {"cpu": "100m", "memory": "2304Mi"},
        "limits": {"memory": "4Gi"},
    }
    assert server({"write": {"buffer": "16Mi"}, "maxBlockSize": "768Mi"})["requests"]["memory"] == "1281Mi"


def test_a_larger_memory_limit_is_requested_and_the_default_is_not():
    def server(nodes: dict[str, Any]) -> dict[str, Any]:
        pod = find(build(inputs(nodes=nodes)), "DaemonSet")["spec"]["template"]["spec"]
        return next(c for c in pod["containers"] if c["name"] == "server")["resources"]

    assert server({}) == server({"memoryLimit": "2Gi"})
    assert server({"memoryLimit": "16Gi"}) == {
        "requests": {"cpu": "100m", "memory": "15104Mi"},
        "limits": {"memory": "16896Mi"},
    }
    assert server({"memoryLimit": "1Gi"})["requests"] == server({})["requests"]


def test_there_is_no_golden_file_without_a_case():
    assert {p.stem for p in GOLDEN.glob("*.yaml")} == {
        *CASES,
        "claims",
        "rbac",
    }  # of other modules


def test_policies_let_in_the_pools_own_pods_and_the_operator():
    policies = {m["metadata"]["name"]: m["spec"] for m in CASES["closed"] if m["kind"] == "NetworkPolicy"}
    assert policies.keys() == {"chat-sidecar", "chat-index"}
    operator = {"app.kubernetes.io/name": "kvpool", "app.kubernetes.io/component": "operator"}
    for name, spec in policies.items():
        kind = "DaemonSet" if name == "chat-sidecar" else "StatefulSet"
        template = find(CASES["closed"], kind)["spec"]["template"]
        assert spec["podSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
        (named,) = [rule["from"] for rule in spec["ingress"] if "from" in rule]
        assert {"namespaceSelector": {}, "podSelector": {"matchLabels": operator}} in named
        own = [peer for peer in named if "namespaceSelector" not in peer]
        assert all(peer["podSelector"]["matchLabels"]["kvpool.dev/pool"] == "chat" for peer in own)
    redis, probes = policies["chat-index"]["ingress"]
    assert redis["ports"] == [{"port": 6379, "protocol": "TCP"}]
    assert probes == {"ports": [{"port": 7424, "protocol": "TCP"}]}
    to_all = [rule["ports"] for rule in policies["chat-sidecar"]["ingress"] if "from" not in rule]
    assert [[p["port"] for p in ports] for ports in to_all] == [[7422]]
    assert not [m for m in CASES["full"] if m["kind"] == "NetworkPolicy"]


def test_with_an_external_index_there_is_no_policy_for_one():
    made = build(replace(EXTERNAL, env=CLOSED))
    assert [m["metadata"]["name"] for m in made if m["kind"] == "NetworkPolicy"] == ["chat-sidecar"]


@pytest.mark.parametrize("name", CASES)
def test_manifests_are_valid_kubernetes(name: str):
    for manifest in CASES[name]:
        kubernetes_validate.validate(manifest, "1.34", strict=True)


@pytest.mark.parametrize("name", CASES)
def test_every_object_is_labelled_named_and_owned(name: str):
    manifests = CASES[name]
    assert len({ref(m) for m in manifests}) == len(manifests)
    for m in manifests:
        metadata = m["metadata"]
        assert metadata["labels"]["app.kubernetes.io/managed-by"] == "kvpool-operator"
        assert metadata["labels"]["kvpool.dev/pool"] == "chat"
        if KINDS[m["kind"]].namespaced:
            assert metadata["namespace"] == "kvpool-system"
            owned = metadata["name"] != "chat-secret" and name != "cleanup"
            assert bool(metadata.get("ownerReferences")) == owned, metadata["name"]
        else:
            assert metadata["labels"]["kvpool.dev/pool-namespace"] == "kvpool-system"
            assert "kvpool-system" in metadata["name"]


@pytest.mark.parametrize("name", CASES)
def test_no_container_has_more_power_than_it_needs(name: str):
    for owner, spec in pods(CASES[name]):
        assert spec["automountServiceAccountToken"] is False
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for c in [*spec.get("initContainers", []), *spec["containers"]]:
            s = c["securityContext"]
            assert s["allowPrivilegeEscalation"] is False
            assert s["readOnlyRootFilesystem"] is True
            assert s["capabilities"]["drop"] == ["ALL"]
            assert s["capabilities"].get("add", []) == (["CHOWN"] if c["name"] == "prepare-node" else [])
            root = c["name"] == "prepare-node"
            assert (s["runAsUser"] == 0, s["runAsGroup"], s["runAsNonRoot"]) == (root, 0 if root else 65532, not root)
            if not root:
                own = c["name"] != "index" and FIRST_USER <= s["runAsUser"] <= LAST_USER
                assert own or s["runAsUser"] == 65532, (owner, c["name"])
            assert c["resources"]["limits"]["memory"]


def test_the_node_agent_finds_the_server_by_its_labels_owner_and_volume():
    (daemonset,) = [m for m in CASES["full"] if m["metadata"]["name"] == "chat-sidecar" and m["kind"] == "DaemonSet"]
    template = daemonset["spec"]["template"]
    assert template["metadata"]["labels"].items() >= {
        ("kvpool.dev/sockets", "agent"),
        ("kvpool.dev/pool", "chat"),
        ("app.kubernetes.io/component", "sidecar"),
        ("app.kubernetes.io/managed-by", "kvpool-operator"),
    }
    (server,) = template["spec"]["containers"]
    assert server["name"] == "server"
    assert server["securityContext"]["runAsUser"]
    env = {e["name"]: e.get("value") for e in server["env"]}
    assert env["KVPOOL_RENDEZVOUS_SOCKET"] == "/run/handoff/handoff.sock"
    assert {"name": "handoff", "mountPath": "/run/handoff"} in server["volumeMounts"]
    assert {"name": "handoff", "emptyDir": {}} in template["spec"]["volumes"]


def test_the_server_sees_each_tier_twice_and_once_read_only():
    _, spec = next(p for p in pods(CASES["full"]) if p[0] == "chat-sidecar")
    mounts = {m["mountPath"]: m for m in spec["containers"][0]["volumeMounts"]}
    for tier in ("nvme", "second", "cold"):
        assert not mounts[f"/tiers/{tier}"].get("readOnly")
        assert mounts[f"/tiers-ro/{tier}"]["readOnly"] is True
        assert mounts[f"/tiers/{tier}"]["name"] == mounts[f"/tiers-ro/{tier}"]["name"] == f"tier-{tier}"


def test_the_index_pod_fits_the_restricted_standard():
    _, spec = next(p for p in pods(CASES["minimal"]) if p[0] == "chat-index")
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert {k for v in spec["volumes"] for k in v if k != "name"} == {"emptyDir", "secret"}


def test_a_pools_secret_stays_as_it_is():
    first = generate_secret()
    manifest = secret(Inputs(pool(), ENV, first))
    assert read_secret(manifest, generate_secret()) == first


def test_only_what_is_missing_in_a_secret_is_made_anew():
    first, fresh = generate_secret(), generate_secret()
    manifest = secret(Inputs(pool(), ENV, first))
    del manifest["data"]["managed-index-password"]
    manifest["data"]["pool-id"] = "%%%"
    kept = read_secret(manifest, fresh)
    assert (kept.pool_secret, kept.pool_id) == (first.pool_secret, fresh.pool_id)
    assert kept.managed_index_password == fresh.managed_index_password


def test_a_lost_secret_keeps_the_pools_identity():
    assert generate_secret("known").pool_id == "known"
    assert generate_secret("known").pool_secret != generate_secret("known").pool_secret


def test_secrets_do_not_show_in_what_is_printed():
    assert "abab" not in repr(SECRET)
    assert "redis-password" not in repr(inputs())
    assert "their-password" not in repr(EXTERNAL)


def test_passwords_are_in_the_secret_and_nowhere_else():
    for manifest in CASES["external"]:
        text = yaml.safe_dump(manifest)
        if manifest["kind"] != "Secret":
            assert "their-key" not in text
            assert "their-password" not in text
            assert base64.b64encode(b"their-password").decode() not in text


def test_the_digest_changes_with_what_matters_to_a_running_sidecar():
    def digest(**spec: Any) -> str:
        return inputs(**spec).config.restart_digest

    assert digest() == digest(cleanupTimeout="1m") == digest(deletionPolicy="Delete")
    assert digest() != digest(cache={"maxBlockSize": "128Mi"})
    assert EXTERNAL.config.restart_digest == (  # a password is read again for each connection
        Inputs(
            EXTERNAL.pool,
            EXTERNAL.env,
            SECRET,
            EXTERNAL.allowed_namespaces,
            ExternalIndexUrl("rediss://r:6380/2", "me", "new"),
        ).config.restart_digest
    )


def test_generation_alone_rolls_nothing():
    a = pool()
    b = a.model_copy(update={"metadata": a.metadata.model_copy(update={"generation": 99})})
    assert Inputs(a, ENV, SECRET).config.restart_digest == Inputs(b, ENV, SECRET).config.restart_digest


def test_the_configuration_is_one_that_sidecars_read():
    text = find(CASES["full"], "ConfigMap")["data"]["pool.json"]
    config = loads(PoolConfig, text)
    assert config == to_pool_config(FULL.pool, pool_id=SECRET.pool_id, index_url=config.index.url)
    assert config.uid == SECRET.pool_id
    assert [t.path for t in config.local] == ["/tiers/nvme", "/tiers/second"]
    assert (config.local[0].reserve_free_percent, config.local[0].reserve_free_bytes) == (5, 0)
    assert (config.local[1].reserve_free_percent, config.local[1].reserve_free_bytes) == (0, 50 * 2**30)
    assert config.shared is not None
    assert config.shared.capacity_bytes == 2**40
    assert (config.index.lookup_timeout_ms, config.peer.port, config.generation) == (10, 7500, 3)
    events = config.events
    assert (events.enabled, events.port, events.replay_port) == (True, 6557, 6558)
    assert (events.topic, events.hashes, events.token_revision) == ("kv@{node}@llama", "Int64", 0)


def test_routers_get_a_secret_with_their_token_and_keys_alone_where_there_are_events():
    made = [m for m in CASES["full"] if m["kind"] == "Secret"]
    assert [m["metadata"]["name"] for m in made] == ["chat-secret", "chat-events", "chat-hints"]
    data = {key: base64.b64decode(text).decode() for key, text in made[1]["data"].items()}
    token = data.pop("token")
    server_key, router_key = events_curve_keys(SECRET.pool_secret.encode(), SECRET.pool_id, 0)
    assert data == {
        "curve-server-public-key": zmq.curve_public(encode(server_key)).decode(),
        "curve-public-key": zmq.curve_public(encode(router_key)).decode(),
        "curve-secret-key": encode(router_key).decode(),
    }
    assert token == events_token(SECRET.pool_secret.encode(), SECRET.pool_id, 0)
    other = build(inputs(events={"enabled": True, "tokenRevision": 1}))
    assert base64.b64decode(find(other, "Secret", "chat-events")["data"]["token"]).decode() not in ("", token)
    assert [m["metadata"]["name"] for m in CASES["minimal"] if m["kind"] == "Secret"] == ["chat-secret", "chat-hints"]
    names = {p["name"] for _, spec in pods(CASES["full"]) for c in spec["containers"] for p in c.get("ports", ())}
    assert {"kv-events", "kv-replay"} <= names


def test_gateways_get_a_secret_with_the_token_for_hints_alone_while_hints_are_on():
    made = find(CASES["minimal"], "Secret", "chat-hints")["data"]
    assert made.keys() == {"token"}
    token = base64.b64decode(made["token"]).decode()
    assert token == hints_token(SECRET.pool_secret.encode(), SECRET.pool_id, 0)
    other = find(build(inputs(hints={"tokenRevision": 1})), "Secret", "chat-hints")
    assert base64.b64decode(other["data"]["token"]).decode() not in ("", token)
    off = build(inputs(hints={"enabled": False}))
    assert [m["metadata"]["name"] for m in off if m["kind"] == "Secret"] == ["chat-secret"]


def test_sidecars_get_the_pools_limits_for_hints():
    given = inputs(hints={"share": 10, "maxKeep": "5m", "tokenRevision": 3}).config.config.hints
    assert given == HintsConfig(enabled=True, share_percent=10, max_keep_s=300, token_revision=3)
    assert inputs().config.config.hints == HintsConfig()


def event_rules(**events: Any) -> list[Manifest]:
    """The rules of the sidecars' NetworkPolicy that name an event port."""
    policy = find(build(Inputs(pool(events={"enabled": True, **events}), CLOSED, SECRET)), "NetworkPolicy", "sidecar")
    return [r for r in policy["spec"]["ingress"] if any(p["port"] in (5557, 5558) for p in r.get("ports", ()))]


def test_no_pod_reaches_the_event_ports_unless_the_pool_names_it():
    assert event_rules() == []
    routers = {"namespaceSelector": {"matchLabels": {"team": "llm-d"}}, "podSelector": {"matchLabels": {"app": "epp"}}}
    ports = [{"port": 5557, "protocol": "TCP"}, {"port": 5558, "protocol": "TCP"}]
    assert event_rules(**{"from": [routers]}) == [{"from": [routers], "ports": ports}]
    assert event_rules(**{"from": [{"namespaceSelector": {}}]})[0]["from"] == [{"namespaceSelector": {}}]
    with pytest.raises(InvalidPoolError, match="podSelector"):
        event_rules(**{"from": [{}]})
    # the first rule admits sidecars and the operator to every port
    policy = find(CASES["closed"], "NetworkPolicy", "sidecar")
    assert [sorted(r) for r in policy["spec"]["ingress"]] == [["from"], ["ports"]]


def test_subscribers_are_authenticated_unless_the_pool_says_otherwise():
    assert to_pool_config(pool(events={"enabled": True}), pool_id="x", index_url="").events.authentication == "Curve"
    unsafe = pool(events={"enabled": True, "authentication": "None"})
    assert to_pool_config(unsafe, pool_id="x", index_url="").events.authentication == "None"


@pytest.mark.parametrize("size", [0, 4, 32])
def test_keys_are_written_as_zeromq_writes_them(size: int):
    data = bytes(range(200, 200 + size)) if size < 56 else b""
    assert z85(data).encode() == encode(data)


def test_tiers_can_be_mapped_to_other_directories():
    config = to_pool_config(
        example("kvcachepool.yaml"), pool_id="x", index_url="", tier_path={"nvme": "/a", "shared": "/b"}.__getitem__
    )
    assert (config.local[0].path, config.shared and config.shared.path, config.index.username) == ("/a", "/b", "")


def test_an_object_store_needs_no_mount_and_its_credentials_are_only_mounted():
    ours = Inputs(example("object-store.yaml"), ENV, SECRET)
    made = build(ours)
    config = loads(PoolConfig, find(made, "ConfigMap")["data"]["pool.json"])
    assert config.shared is None
    assert config.fsspec == FsspecTier(
        "objects", "s3://kv-blocks/chat", "http://minio.storage:9000", "us-east-1", 20 * 2**40
    )
    for manifest, container in (
        (find(made, "DaemonSet"), "server"),
        (wipe_daemonset(ours.pool, ENV), "wipe"),
    ):
        pod = manifest["spec"]["template"]["spec"]
        (volume,) = (v for v in pod["volumes"] if v["name"] == "object-store")
        assert volume["secret"]["secretName"] == "chat-object-store"
        users = [
            c for c in pod["initContainers"] + pod["containers"]
            if any(m["name"] == "object-store" for m in c.get("volumeMounts", []))
        ]  # fmt: skip
        assert [c["name"] for c in users] == [container]
        assert {"name": "KVPOOL_OBJECT_SECRET_DIR", "value": "/etc/kvpool-object-store"} in users[0]["env"]
        assert "tier-objects" not in str(pod)


def test_clients_get_their_deadlines_from_the_sidecar_which_knows_the_pool_as_it_is_now():
    asked = {"loadDeadline": "250ms", "expectedBandwidth": "2500M", "breaker": {"failures": 9, "cooldown": "3s"}}
    made = to_client_config(pool(failOpen=asked))
    assert made.pool == "kvpool-system/chat"
    assert made.deadlines == Deadlines(breaker_failures=9, breaker_cooldown_ms=3000)
    served = to_pool_config(pool(failOpen=asked), pool_id="x", index_url="").deadlines
    assert (served.load_min_ms, served.load_expected_mb_s) == (250, 2500)


tier_names = st.from_regex(r"[a-z]([-a-z0-9]{0,22}[a-z0-9])?", fullmatch=True)


@settings(deadline=None, max_examples=25)  # checking against the schema of Kubernetes takes its time
@given(
    st.lists(tier_names, min_size=1, max_size=8, unique=True),
    st.booleans(),
    st.integers(1024, 65535).filter(lambda p: p not in (7422, 7423) and not 10248 <= p <= 10259),
    st.integers(1, 98),
)
def test_the_same_inputs_give_the_same_valid_manifests(names: list[str], shared: bool, port: int, low: int):
    tiers = [
        {"name": n, "local": {"path": f"/mnt/d{i}", "capacity": "1Gi"}}
        for i, n in enumerate(names[: 7 if shared else 8])
    ]
    if shared:
        tiers.append({"name": "a-shared-tier", "shared": {"hostPath": {"path": "/mnt/s"}, "capacity": "1Gi"}})
    spec = {
        "tiers": [t for i, t in enumerate(tiers) if t["name"] not in [u["name"] for u in tiers[:i]]],
        "transport": {"port": port},
        "cache": {"eviction": {"lowWatermark": low, "highWatermark": low + 1}},
    }
    first, second = build(inputs(**spec)), build(inputs(**spec))
    assert first == second
    daemonset = find(first, "DaemonSet")
    kubernetes_validate.validate(daemonset, "1.34", strict=True)
    loads(PoolConfig, find(first, "ConfigMap")["data"]["pool.json"])


def test_times_to_live_and_the_quota_reach_the_sidecar():
    pool = KVCachePool.parse(
        {
            "metadata": {"name": "p", "namespace": "n"},
            "spec": {
                "tiers": [{"name": "nvme", "local": {"path": "/mnt/nvme/kv", "capacity": "1Gi"}}],
                "cache": {"ttl": {"idle": "24h", "maxAge": "1500ms"}, "eviction": {"policy": "S3FIFO"}},
                "tenancy": {"defaultQuota": {"capacity": "200Gi"}, "saltTags": True},
            },
        }
    )
    config = to_pool_config(pool, pool_id="x", index_url="")
    assert config.salt_tags
    cache = config.cache
    assert (cache.idle_ttl_s, cache.max_age_s, cache.eviction_policy) == (86400, 2, "S3FIFO")
    assert cache.tenant_quota_bytes == 200 << 30


@pytest.mark.parametrize(("given", "reported"), [({}, "Prefer"), ({"dedicatedFilesystem": "Require"}, "Require")])
def test_whether_a_tier_needs_its_own_file_system_reaches_the_sidecar(given, reported):
    local = {"path": "/mnt/nvme/kv", "capacity": "1Gi", **given}
    raw = {"metadata": {"name": "p", "namespace": "n"}, "spec": {"tiers": [{"name": "nvme", "local": local}]}}
    config = to_pool_config(KVCachePool.parse(raw), pool_id="x", index_url="")
    assert config.local[0].dedicated_filesystem == reported
