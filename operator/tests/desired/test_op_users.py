"""Kernel users of sidecars: one for each pool, the same for ever, which no engine's pod may request."""

from __future__ import annotations

from typing import Any

import pytest
from op_samples import inputs, pool

from kvpool_operator.desired import build
from kvpool_operator.desired.preflight import build_preflight
from kvpool_operator.desired.users import FIRST_USER, LAST_USER, USER, server_user
from kvpool_operator.desired.wipe import build_cleanup
from kvpool_operator.injection.annotations import parse_annotations
from kvpool_operator.injection.mutator import InjectionSettings, inject
from kvpool_operator.injection.skip import Skip, SkipReason
from kvpool_sidecar.system.users import DEFAULT_USER, is_server_user

LOCAL = {"name": "nvme", "local": {"path": "/mnt/nvme", "capacity": "1Gi"}}
INJECTION = InjectionSettings(
    pool="ai/chat", block_tokens=16, host_memory_bytes=1 << 30, client_config="{}", sidecar_image="sidecar:1"
)
SHARED = {"name": "cold", "shared": {"hostPath": {"path": "/mnt/cold"}, "capacity": "1Ti"}}


def with_uid(uid: str):
    one = pool(tiers=[LOCAL])
    return one.model_copy(update={"metadata": one.metadata.model_copy(update={"uid": uid})})


def test_each_pool_has_a_user_of_its_own_and_keeps_it():
    users = {server_user(with_uid(f"pool-{n}")) for n in range(200)}
    assert len(users) == 200
    assert min(users) >= FIRST_USER
    assert max(users) <= LAST_USER
    assert server_user(with_uid("0d4e8f3c-9f61-4d0e-a6dd-0c3a4c5d6e7f")) == 2_009_334_898  # every release


def test_a_shared_directory_keeps_the_user_that_it_was_prepared_for_unless_the_spec_names_one():
    assert server_user(pool(tiers=[LOCAL, SHARED])) == USER
    assert server_user(pool(tiers=[LOCAL, SHARED], nodes={"runAsUser": 2_000_000_007})) == 2_000_000_007


def test_the_server_its_preparation_its_checks_and_the_wipe_have_the_same_user():
    made = inputs(tiers=[LOCAL])
    user = server_user(made.pool)
    seen: dict[str, Any] = {}
    for manifest in [*build(made), *build_preflight(made), *build_cleanup(made)]:
        if manifest["kind"] == "DaemonSet":
            spec = manifest["spec"]["template"]["spec"]
            for c in [*spec.get("initContainers", []), *spec["containers"]]:
                if c["name"] == "prepare-node":
                    assert c["command"][c["command"].index("--uid") + 1] == str(user)
                    migrates = "--migrate" in c["command"]
                    assert migrates == (manifest["metadata"]["name"] == "chat-sidecar")
                else:
                    seen[c["name"]] = c["securityContext"]["runAsUser"]
    assert {seen[name] for name in ("server", "preflight", "wipe")} == {user}


def test_a_sidecar_knows_the_users_that_the_operator_may_give_it():
    assert USER == DEFAULT_USER
    assert all(map(is_server_user, (USER, FIRST_USER, LAST_USER)))
    assert not any(map(is_server_user, (0, 1000, FIRST_USER - 1, LAST_USER + 1)))


@pytest.mark.parametrize("where", ["pod", "container", "init container"])
def test_a_pod_with_a_users_id_of_sidecars_is_not_injected(where: str):
    engine = {"name": "engine", "image": "vllm/vllm-openai:v0.11.0", "args": ["--model", "m"]}
    spec: dict[str, Any] = {"containers": [engine]}
    pod = {"metadata": {"name": "e", "annotations": {"kvpool.dev/engine": "vllm"}}, "spec": spec}
    if where == "init container":
        spec["initContainers"] = [{"name": "prepare", "image": "prepare:1"}]
    part = {"pod": spec, "container": spec["containers"][0], "init container": (spec.get("initContainers") or [{}])[0]}
    part[where]["securityContext"] = {"runAsUser": FIRST_USER + 5}
    with pytest.raises(Skip, match=str(FIRST_USER + 5)) as e:
        inject(pod, parse_annotations(pod), INJECTION)
    assert e.value.reason is SkipReason.USER_RESERVED
    part[where]["securityContext"] = {"runAsUser": 65532}
    assert inject(pod, parse_annotations(pod), INJECTION).pod["metadata"]["annotations"]
