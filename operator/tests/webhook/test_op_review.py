"""AdmissionReview in and out: always allowed, and a sentence wherever nothing was injected."""

import asyncio
import base64
import copy
import json

import jsonpatch as reference
import pytest

from kvpool_operator.injection.pool_selection import NamespaceView
from kvpool_operator.injection.skip import Skip, SkipReason
from kvpool_operator.webhook.pool_cache import PoolCache
from kvpool_operator.webhook.review import InjectorConfig, review_pod

INSTALLATION = InjectorConfig("kvpool-sidecar:0.1.0")


def a_review(pod=None, **request):
    pod = pod or {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": "e",
            "labels": {"kvpool.dev/inject": "true"},
            "annotations": {"kvpool.dev/pool": "chat"},
        },
        "spec": {"containers": [{"name": "engine", "image": "x", "command": ["vllm", "serve", "m"]}]},
    }
    return {
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "request": {
            "uid": "7",
            "operation": "CREATE",
            "kind": {"group": "", "version": "v1", "kind": "Pod"},
            "namespace": "team-a",
            "object": pod,
        }
        | request,
    }


class Cluster:
    def __init__(self, *, ready=True):
        self.ready = ready

    async def list_pools(self):
        tiers = [{"name": "nvme", "local": {"path": "/mnt/nvme/kv", "capacity": "1Gi"}}]
        return [
            {
                "metadata": {"namespace": "kvpool-system", "name": "chat"},
                "spec": {
                    "tiers": tiers,
                    "cache": {"blockTokens": 128},
                    "injection": {"allowedNamespaces": {"from": "All"}, "vllm": {"hostMemory": "2Gi"}},
                },
                "status": {"conditions": [{"type": "Ready", "status": str(self.ready)}]},
            }
        ]

    async def read_namespace(self, name):
        return NamespaceView()


async def answered(review, resolve=None, timeout_s=5.0):
    before = copy.deepcopy(review)
    result = await review_pod(review, resolve or PoolCache(Cluster()).resolve, INSTALLATION, timeout_s=timeout_s)
    assert review == before
    response = result.review["response"]
    assert response["uid"] == "7"
    assert response["allowed"] is True
    assert (result.review["apiVersion"], result.review["kind"]) == ("admission.k8s.io/v1", "AdmissionReview")
    return result, response


def patched(review, response):
    assert response["patchType"] == "JSONPatch"
    return reference.apply_patch(review["request"]["object"], json.loads(base64.b64decode(response["patch"])))


async def test_a_pod_is_injected_with_its_pools_numbers():
    review = a_review()
    result, response = await answered(review)
    assert result.outcome == "injected"
    assert "warnings" not in response
    pod = patched(review, response)
    variables = {e["name"]: e["value"] for e in pod["spec"]["containers"][0]["env"]}
    connector = json.loads(variables["KVPOOL_VLLM_KV_TRANSFER_CONFIG"])["kv_connector_extra_config"]
    assert connector["block_size"] == 128
    assert connector["cpu_bytes_to_use"] == 2 * 2**30
    assert pod["metadata"]["annotations"]["kvpool.dev/pool"] == "kvpool-system/chat"

    again, response = await answered(a_review(pod))
    assert again.outcome == "unchanged"
    assert "patch" not in response


async def test_the_patch_touches_only_what_is_added():
    review = a_review()
    _, response = await answered(review)
    ops = json.loads(base64.b64decode(response["patch"]))
    assert {(o["op"], o["path"]) for o in ops} == {
        ("add", "/spec/volumes"),
        ("add", "/spec/initContainers"),
        ("add", "/spec/containers/0/env"),
        ("add", "/spec/containers/0/volumeMounts"),
        ("replace", "/metadata/annotations/kvpool.dev~1pool"),
        ("add", "/metadata/annotations/kvpool.dev~1injected"),
        ("add", "/metadata/annotations/kvpool.dev~1injected-engine"),
        ("add", "/metadata/annotations/kvpool.dev~1injected-revision"),
    }


async def test_a_pool_that_is_not_ready_is_injected_with_a_warning():
    result, response = await answered(a_review(), PoolCache(Cluster(ready=False)).resolve)
    assert result.outcome == "injected"
    assert "not Ready" in response["warnings"][0]


@pytest.mark.parametrize(
    "request_part",
    [
        {"operation": "UPDATE"},
        {"kind": {"group": "apps", "version": "v1", "kind": "Deployment"}},
        {"subResource": "ephemeralcontainers"},
        {"object": {"metadata": {"labels": {"kvpool.dev/inject": "false"}}}},
        {"object": {"metadata": {}}},
        {"object": None},
    ],
)
async def test_what_is_not_ours_is_left_alone(request_part):
    result, response = await answered(a_review(**request_part))
    assert result.outcome == "ignored"
    assert set(response) == {"uid", "allowed"}


async def test_a_skip_is_an_annotation_and_a_warning():
    review = a_review()
    review["request"]["object"]["spec"]["containers"][0]["command"] = ["sleep", "1"]
    result, response = await answered(review)
    assert result.outcome == "unsupported-engine"
    note = patched(review, response)["metadata"]["annotations"]["kvpool.dev/skip-reason"]
    assert note.startswith("unsupported-engine: ")
    assert response["warnings"][0].startswith("kvpool: not injected: unsupported-engine: ")
    assert len(response["warnings"][0]) <= 256


@pytest.mark.parametrize("reason", [SkipReason.POOL_NOT_FOUND, SkipReason.NAMESPACE_NOT_ALLOWED])
async def test_every_reason_comes_through(reason):
    async def resolve(*_):
        raise Skip(reason, "because")

    review = a_review()
    result, response = await answered(review, resolve)
    assert result.outcome == reason.value
    assert patched(review, response)["metadata"]["annotations"]["kvpool.dev/skip-reason"] == f"{reason}: because"


async def test_an_error_inside_admits_the_pod(caplog):
    async def resolve(*_):
        raise RuntimeError("a bug")

    result, response = await answered(a_review(), resolve)
    assert result.outcome == "internal-error"
    assert "internal-error" in response["warnings"][0]
    assert "a bug" in caplog.text
    assert "a bug" not in json.dumps(response)


async def test_a_slow_cluster_admits_the_pod(caplog):
    async def resolve(*_):
        await asyncio.Event().wait()

    result, response = await answered(a_review(), resolve, timeout_s=0.01)
    assert result.outcome == "webhook-not-ready"
    assert response["warnings"]


@pytest.mark.parametrize(
    "pod",
    [
        {"metadata": {"labels": {"kvpool.dev/inject": "true"}}, "spec": {"containers": "none"}},
        {"metadata": {"labels": {"kvpool.dev/inject": "true"}}, "spec": []},
        {"metadata": {"labels": {"kvpool.dev/inject": "true"}, "annotations": []}},
    ],
)
async def test_a_pod_of_a_strange_shape_is_admitted(pod):
    await answered(a_review(pod))


@pytest.mark.parametrize("review", [None, [], {}, {"request": None}, {"request": {}}, {"request": {"uid": 5}}])
async def test_what_cannot_be_answered_is_an_error_for_the_server_to_turn_into_400(review):
    with pytest.raises(ValueError, match="uid"):
        await review_pod(review, PoolCache(Cluster()).resolve, INSTALLATION, timeout_s=1)


class Namespaced(Cluster):
    """A namespace with the opt-in label."""

    async def read_namespace(self, name):
        return NamespaceView({"kvpool.dev/inject": "enabled"})


def unlabeled(*command, **notes):
    pod = a_review()["request"]["object"]
    pod["metadata"] = {"name": "e"} | ({"annotations": notes} if notes else {})
    pod["spec"]["containers"][0]["command"] = list(command)
    return pod


async def test_an_engine_in_a_namespace_with_the_label_is_injected_and_labeled():
    review = a_review(unlabeled("vllm", "serve", "m"))
    result, response = await answered(review, PoolCache(Namespaced()).resolve)
    assert result.outcome == "injected"
    metadata = patched(review, response)["metadata"]
    assert metadata["labels"] == {"kvpool.dev/inject": "true"}
    assert metadata["annotations"]["kvpool.dev/selected-by"] == "namespace"
    assert metadata["annotations"]["kvpool.dev/pool"] == "kvpool-system/chat"
    again, _ = await answered(a_review(patched(review, response)), PoolCache(Namespaced()).resolve)
    assert again.outcome == "unchanged"


async def test_other_pods_of_such_a_namespace_are_left_without_a_word():
    for pod in (unlabeled("redis-server"), unlabeled("vllm", "bench", "serve")):
        result, response = await answered(a_review(pod), PoolCache(Namespaced()).resolve)
        assert (result.outcome, set(response)) == ("ignored", {"uid", "allowed"})


async def test_an_engine_of_such_a_namespace_that_cannot_be_injected_says_why():
    command = ("vllm", "serve", "m", "--kv-transfer-config", '{"kv_connector":"Mine"}')
    review = a_review(unlabeled(*command))
    result, response = await answered(review, PoolCache(Namespaced()).resolve)
    assert result.outcome == "connector-present"
    metadata = patched(review, response)["metadata"]
    assert metadata["labels"] == {"kvpool.dev/inject": "true"}
    assert metadata["annotations"]["kvpool.dev/skip-reason"].startswith("connector-present: ")


@pytest.mark.parametrize("value", ["false", "disabled"])
async def test_a_pod_that_opted_out_is_left_alone_wherever_it_is(value):
    pod = unlabeled("vllm", "serve", "m")
    pod["metadata"]["labels"] = {"kvpool.dev/inject": value}
    result, response = await answered(a_review(pod), PoolCache(Namespaced()).resolve)
    assert (result.outcome, set(response)) == ("ignored", {"uid", "allowed"})


async def test_a_pod_that_nothing_selects_is_left_without_a_word():
    result, response = await answered(a_review(unlabeled("vllm", "serve", "m")))
    assert (result.outcome, set(response)) == ("ignored", {"uid", "allowed"})


async def test_while_the_pools_are_unknown_a_pod_without_a_label_is_not_marked():
    async def fails(*_):
        raise ConnectionError("no API server")

    result, response = await answered(a_review(unlabeled("vllm", "serve", "m")), fails)
    assert result.outcome == "internal-error"
    assert "patch" not in response
