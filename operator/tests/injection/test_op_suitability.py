"""Versions, accelerators and variables of the user: what is skipped, what has a warning, what is combined."""

from __future__ import annotations

from typing import Any

import pytest
from op_injection import SGLANG, env, family, injected, pod_of, skipped

from kvpool_operator.injection.engine_versions import version_of_image
from kvpool_operator.injection.skip import SkipReason

SERVE = ["vllm", "serve", "m"]


@pytest.mark.parametrize(
    ("engine", "image", "version"),
    [
        ("vllm", "vllm/vllm-openai:v0.33.0", (0, 33, 0)),
        ("vllm", "vllm/vllm-openai:v0.8.5.post1", (0, 8, 5)),
        ("vllm", "registry.example:5000/vllm-openai:0.32.1-cu128@sha256:00", (0, 32, 1)),
        ("vllm", "vllm/vllm-openai:v0.34.0rc1", None),
        ("vllm", "vllm/vllm-openai:v0.33.1.dev5", None),
        ("vllm", "vllm/vllm-openai:nightly-0a1b2c3d", None),
        ("vllm", "vllm/vllm-openai:latest", None),
        ("vllm", "vllm/vllm-openai", None),
        ("vllm", "vllm/vllm-openai@sha256:00", None),
        ("vllm", "lmcache/vllm-openai:v0.3.9post2", None),
        ("vllm", "nvcr.io/nvidia/vllm:26.10-py3", None),
        ("vllm", "nvcr.io/nvidia/ai-dynamo/vllm-runtime:0.8.0", None),
        ("vllm", "registry.redhat.io/rhaiis/vllm-cuda-rhel9:3.2.5", None),
        ("vllm", "acme.example/inference:0.1.0", None),
        ("sglang", "lmsysorg/sglang:v0.5.13.post1-cu129", (0, 5, 13)),
        ("sglang", "lmsysorg/sglang:v0.4.6.post5", (0, 4, 6)),
        ("sglang", "nvcr.io/nvidia/sglang:26.10-py3", None),
        ("lmcache", "lmcache/standalone:v0.5.6", (0, 5, 6)),
        ("lmcache", "mirror.example/lmcache/vllm-openai:v0.3.9post2", (0, 3, 9)),
    ],
)
def test_a_release_is_read_only_from_the_tag_of_the_engines_own_image(engine: str, image: str, version: Any):
    assert version_of_image(engine, image) == version


@pytest.mark.parametrize(
    "container",
    [
        {"image": "vllm/vllm-openai:v0.8.5.post1", "args": ["--model", "m"]},
        {"image": "vllm/vllm-openai:v0.23.0", "command": SERVE},
        {"image": "lmsysorg/sglang:v0.4.9.post3", "command": SGLANG},
    ],
)
def test_a_release_without_the_interface_is_skipped_unless_the_user_names_the_engine(container: dict[str, Any]):
    reason, message = skipped(pod_of(container))
    assert reason is SkipReason.UNSUPPORTED_ENGINE
    assert "by its image tag" in message
    engine = "sglang" if "sglang" in container["image"] else "vllm"
    _, warnings = injected(pod_of(container, engine=engine))
    assert "not a tested release" in warnings[-1]


@pytest.mark.parametrize(
    ("container", "is_tested"),
    [
        ({"image": "vllm/vllm-openai:v0.33.0", "command": SERVE}, True),
        ({"image": "vllm/vllm-openai:v0.33.0.post1", "command": SERVE}, True),
        ({"image": "vllm/vllm-openai:v0.25.0", "command": SERVE}, False),
        ({"image": "vllm/vllm-openai:v0.99.0", "command": SERVE}, False),
        ({"image": "vllm/vllm-openai:latest", "command": SERVE}, True),
        ({"image": "lmsysorg/sglang:v0.5.23", "command": SGLANG}, True),
        ({"image": "lmsysorg/sglang:v0.5.13.post1", "command": SGLANG}, False),
        ({"image": "lmcache/standalone:v0.6.0", "command": ["lmcache", "server"]}, False),
    ],
)
def test_an_untested_release_is_injected_with_a_warning(container: dict[str, Any], is_tested: bool):
    _, warnings = injected(pod_of(container))
    assert [w for w in warnings if "not a tested release" in w] == ([] if is_tested else warnings)


@pytest.mark.parametrize(
    "container",
    [
        {"image": "quay.io/ascend/vllm-ascend:v0.33.0", "command": SERVE},
        {"command": SERVE, "resources": {"limits": {"google.com/tpu": "8"}}},
        {"command": SGLANG, "resources": {"limits": {"huawei.com/Ascend910": "8"}}},
    ],
)
def test_an_accelerator_without_the_interface_is_skipped_unless_the_user_names_the_engine(container: dict[str, Any]):
    reason, message = skipped(pod_of(container))
    assert reason is SkipReason.UNSUPPORTED_ENGINE
    assert "which the client does not support" in message
    engine = "sglang" if "sglang.launch_server" in container["command"] else "vllm"
    pod, warnings = injected(pod_of(container, engine=engine))
    assert family(pod) == engine
    assert "which the client does not support" in warnings[-1]


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"value": "mine"}, "mine,kvpool"),
        ({"value": "kvpool,mine"}, "kvpool,mine"),
        ({"value": ""}, "kvpool"),
        ({"value": "$(NAMES)"}, "$(NAMES),kvpool"),
    ],
)
def test_the_plug_in_is_appended_to_the_users_list(given: dict[str, Any], kept: str):
    pod, warnings = injected(pod_of({"command": SERVE, "env": [{"name": "VLLM_PLUGINS", **given}]}))
    assert env(pod["spec"]["containers"][0])["VLLM_PLUGINS"] == kept
    assert warnings == []


def test_a_list_of_plug_ins_by_reference_stays_with_a_warning():
    source = {"configMapKeyRef": {"name": "c", "key": "k"}}
    pod, warnings = injected(pod_of({"command": SERVE, "env": [{"name": "VLLM_PLUGINS", "valueFrom": source}]}))
    assert env(pod["spec"]["containers"][0])["VLLM_PLUGINS"] == source
    assert "does not load the plug-in" in warnings[0]


@pytest.mark.parametrize(
    ("given", "is_shared"),
    [
        ({"value": "123"}, True),
        ({"value": "random"}, False),
        ({"value": "$(POD_UID)"}, False),
        ({"valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}}, False),
    ],
)
@pytest.mark.parametrize("command", [SERVE, ["lmcache", "server"]])
def test_a_hash_seed_that_differs_between_pods_has_a_warning(
    given: dict[str, Any], is_shared: bool, command: list[str]
):
    pod, warnings = injected(pod_of({"command": command, "env": [{"name": "PYTHONHASHSEED", **given}]}))
    assert env(pod["spec"]["containers"][0])["PYTHONHASHSEED"] == given.get("value", given.get("valueFrom"))
    assert ["shares blocks only with engines" in w for w in warnings] == ([] if is_shared else [True])


@pytest.mark.parametrize("engine", ["", "vllm"])
def test_a_ray_worker_is_injected_with_a_warning_and_a_head_is_not(engine: str):
    worker = {"name": "ray-worker", "image": "rayproject/ray-llm:2.50.0"}
    _, warnings = injected(pod_of(worker))
    assert "Ray worker" in warnings[0]
    head = {"name": "ray-head", "image": "vllm/vllm-openai:latest"}
    if engine:
        assert family(injected(pod_of(head, engine=engine))[0]) == "vllm"
    else:
        assert "Ray head" in skipped(pod_of(head))[1]


@pytest.mark.parametrize(
    ("text", "is_hidden"),
    [
        ("export PYTHONPATH=/mine; vllm serve m", True),
        ('PYTHONPATH="/mine" vllm serve m', True),
        ("export PYTHONPATH=/mine:$PYTHONPATH; vllm serve m", False),
        ('export PYTHONPATH="${PYTHONPATH}:/mine"; vllm serve m', False),
        ("echo $PYTHONPATH; vllm serve m", False),
        ("export VLLM_PLUGINS=mine; vllm serve m", True),
        ("export VLLM_PLUGINS=mine,kvpool; vllm serve m", False),
        ("python3 -I -m vllm.entrypoints.openai.api_server", True),
        ("python3 -uE -m vllm.entrypoints.openai.api_server", True),
        ("python3 -u -m vllm.entrypoints.openai.api_server", False),
        ("env -i vllm serve m", True),
        ("env A=b vllm serve m", False),
    ],
)
def test_a_command_that_hides_the_client_has_a_warning(text: str, is_hidden: bool):
    _, warnings = injected(pod_of({"command": ["bash", "-c", text]}))
    assert ["hides the client" in w for w in warnings] == ([True] if is_hidden else [])


@pytest.mark.parametrize(
    ("image", "path"),
    [
        ("vllm/vllm-openai:latest", "/run/kvpool/client"),
        (
            "kserve/huggingfaceserver:v0.16.0",
            "/run/kvpool/client:/kserve-workspace/huggingfaceserver:/huggingfaceserver",
        ),
        ("ghcr.io/llm-d/llm-d:v0.2.0", "/run/kvpool/client:/usr/local/nixl/lib/python3/dist-packages"),
        ("opea/vllm-gaudi:1.22.0", "/run/kvpool/client:/root:/usr/lib/habanalabs"),
    ],
)
def test_the_python_path_of_a_known_image_is_kept(image: str, path: str):
    pod, _ = injected(pod_of({"image": image, "command": SERVE}, engine="vllm"))
    assert env(pod["spec"]["containers"][0])["PYTHONPATH"] == path
    mine = [{"name": "PYTHONPATH", "value": "/mine"}]
    pod, _ = injected(pod_of({"image": image, "command": SERVE, "env": mine}, engine="vllm"))
    assert env(pod["spec"]["containers"][0])["PYTHONPATH"] == "/run/kvpool/client:/mine"
