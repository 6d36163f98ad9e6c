"""Which containers of a pod are injected, and where the init container goes."""

from typing import Any

import pytest
from op_injection import NIXL, env, family, injected, pod_of, skipped

from kvpool_operator.injection.skip import SkipReason

VLLM: dict[str, Any] = {"command": ["vllm", "serve", "m"]}
SERVER: dict[str, Any] = {"command": ["lmcache", "server"]}
SIDECAR = {"name": "engine", "image": "registry.example/i", "restartPolicy": "Always", **VLLM}
WAIT = {"name": "wait", "image": "busybox", "command": ["sh", "-c", "until wget -q localhost:8000; do sleep 1; done"]}


def annotated(pod: dict[str, Any], **notes: str) -> dict[str, Any]:
    pod["metadata"]["annotations"] |= {f"kvpool.dev/{k}": v for k, v in notes.items()}
    return pod


def has_client(container: dict[str, Any]) -> bool:
    return "KVPOOL_CLIENT_CONFIG" in env(container)


def inits_of(pod: dict[str, Any]) -> list[str]:
    return [c["name"] for c in pod["spec"]["initContainers"]]


def test_every_engine_of_a_pod_is_injected():
    pod, warnings = injected(pod_of(VLLM, {"image": "envoyproxy/envoy"}, VLLM))
    assert [has_client(c) for c in pod["spec"]["containers"]] == [True, False, True]
    assert inits_of(pod) == ["kvpool-client"]
    assert warnings == []


def test_an_engine_that_is_left_out_is_named():
    connector = {"command": ["vllm", "serve", "m", "--kv-transfer-config", '{"kv_connector":"Mine"}']}
    pod, warnings = injected(pod_of(VLLM, connector))
    assert [has_client(c) for c in pod["spec"]["containers"]] == [True, False]
    (warning,) = warnings
    assert "engine container c1 runs without the pool: container c1 has the KV connector Mine" in warning


def test_an_engine_that_is_left_out_is_not_changed_at_all():
    taken = VLLM | {"volumeMounts": [{"name": "x", "mountPath": "/run/kvpool"}]}
    pod, warnings = injected(pod_of(taken, VLLM, volumes=[{"name": "x", "emptyDir": {}}]))
    assert pod["spec"]["containers"][0] == {"name": "c0", "image": "registry.example/i"} | taken
    assert "c0" in warnings[0]


def test_an_lmcache_server_and_its_engine_are_one_user_of_the_pool():
    mp = '{"kv_connector":"LMCacheMPConnector","kv_role":"kv_both"}'
    pod, warnings = injected(pod_of({"command": ["vllm", "serve", "m", "--kv-transfer-config", mp]}, SERVER))
    assert [has_client(c) for c in pod["spec"]["containers"]] == [False, True]
    assert family(pod) == "lmcache"
    assert warnings == []


def test_an_engine_without_a_connector_next_to_an_lmcache_server_is_injected_too():
    pod, _ = injected(pod_of(VLLM, SERVER))
    assert [has_client(c) for c in pod["spec"]["containers"]] == [True, True]
    assert family(pod) == "vllm"


@pytest.mark.parametrize("names", ["c0,c2", "c2, c0", " c0 ,, c2 "])
def test_the_annotation_can_name_several_containers(names):
    pod, _ = injected(annotated(pod_of(VLLM, VLLM, VLLM), container=names))
    assert [has_client(c) for c in pod["spec"]["containers"]] == [True, False, True]


def test_a_container_that_the_annotation_names_wrongly_is_named():
    reason, message = skipped(annotated(pod_of(VLLM, VLLM), container="c0,c7"))
    assert reason is SkipReason.CONTAINER_NOT_FOUND
    assert "'c7'" in message


def test_containers_that_are_named_with_their_engine_need_not_be_recognized():
    script = {"command": ["/start.sh"]}
    pod, _ = injected(annotated(pod_of(script, script, engine="vllm"), container="c0,c1"))
    assert [has_client(c) for c in pod["spec"]["containers"]] == [True, True]


def test_a_requested_kind_is_that_of_the_best_match():
    nixl = {"command": ["vllm", "serve", "m", "--kv-transfer-config", NIXL]}
    pod, _ = injected(pod_of(nixl, SERVER, engine="lmcache"))
    assert [has_client(c) for c in pod["spec"]["containers"]] == [False, True]
    assert "KVPOOL_LMCACHE_L2" in env(pod["spec"]["containers"][1])


def test_an_engine_that_is_a_native_sidecar_is_injected_and_starts_after_the_client():
    first = {"name": "download", "image": "busybox"}
    pod, _ = injected(pod_of({"image": "busybox"}, initContainers=[first, SIDECAR, WAIT]))
    assert inits_of(pod) == ["download", "kvpool-client", "engine", "wait"]
    assert has_client(pod["spec"]["initContainers"][2])
    assert not has_client(pod["spec"]["containers"][0])


def test_engines_among_containers_and_native_sidecars_are_all_injected():
    pod, _ = injected(pod_of(VLLM, initContainers=[WAIT, SIDECAR]))
    assert inits_of(pod) == ["wait", "kvpool-client", "engine"]
    assert has_client(pod["spec"]["containers"][0])


def test_an_init_container_that_ends_is_no_engine():
    warm_up = {k: v for k, v in SIDECAR.items() if k != "restartPolicy"}
    reason, _ = skipped(pod_of({"image": "busybox"}, initContainers=[warm_up]))
    assert reason is SkipReason.UNSUPPORTED_ENGINE


def test_the_client_comes_after_the_users_init_containers_but_before_those_that_use_it():
    user = {"name": "check", "image": "python", "volumeMounts": [{"name": "kvpool", "mountPath": "/run/kvpool"}]}
    volumes = [{"name": "kvpool", "emptyDir": {}}]
    pod, _ = injected(pod_of(VLLM, initContainers=[WAIT, user], volumes=volumes))
    assert inits_of(pod) == ["wait", "kvpool-client", "check"]
    pod, _ = injected(pod_of(VLLM, initContainers=[{**WAIT, "restartPolicy": "Always"}, {**WAIT, "name": "w2"}]))
    assert inits_of(pod) == ["wait", "w2", "kvpool-client"]
