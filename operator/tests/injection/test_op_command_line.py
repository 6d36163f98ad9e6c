"""Reading command lines: what starts an engine, and which connector the user chose."""

import time

import pytest

from kvpool_operator.injection import engine_start
from kvpool_operator.injection.command_line import inspect_container

SERVE = ["vllm", "serve", "Qwen/Qwen3-8B", "--port", "8000"]
MODULE = ["python3", "-m", "vllm.entrypoints.openai.api_server", "--model", "/models/tiny"]


@pytest.mark.parametrize(
    "container",
    [
        {"command": SERVE},
        {"command": SERVE[:2], "args": SERVE[2:]},
        {"args": SERVE},
        {"command": MODULE},
        {"command": ["python3"], "args": MODULE[1:]},
        {"command": ["/engine/bin/python", "-u", *MODULE[1:]]},
        {"command": ["/opt/venv/bin/vllm", "serve", "m"]},
        {"command": ["tini", "--", *SERVE]},
        {"command": ["/usr/bin/env", "A=b", *SERVE]},
        {"command": ["numactl", "-N", "0", *MODULE]},
        {"command": ["python3", "-m", "vllm.entrypoints.cli.main", "serve", "m"]},
        {"command": ["python3", "/src/vllm/entrypoints/openai/api_server.py"]},
        {"image": "vllm/vllm-openai:v0.33.0", "args": ["--model", "m"]},
        {"image": "registry.example:5000/mirror/vllm-openai@sha256:00", "args": ["Qwen/Qwen3-8B"]},
        {"image": "rocm/vllm", "args": ["--model=m"]},
        {"image": "vllm/vllm-openai"},
        {"image": "ghcr.io/llm-d/llm-d-cuda:v0.7.0", "args": ["--model", "m"]},
        {"image": "ghcr.io/llm-d/llm-d:v0.2.0", "args": ["--model", "m"]},
        {"image": "kserve/huggingfaceserver:v0.16.0-gpu", "args": ["--model_name=m", "--model_dir=/mnt/models"]},
        {"command": ["python3", "-m", "huggingfaceserver", "--model_id", "m"]},
        {"command": ["python3", "-mvllm.entrypoints.openai.api_server", "--model", "m"]},
        {"command": ["python3", "-m", "vllm", "serve", "m"]},
        {"command": ["uv", "run", "--no-sync", *SERVE]},
        {"command": ["/usr/bin/tini", "--", "uv", "run", *MODULE]},
        {"command": ["$(ENGINE)", "serve", "m"], "env": [{"name": "ENGINE", "value": "vllm"}]},
        {"image": "vllm/vllm-openai", "command": ["/start.sh"], "args": ["--max-model-len", "4096"]},
        {"image": "rayproject/ray-llm:2.50.0-py311-cu128", "name": "ray-worker"},
        {"command": [*SERVE, "--config", "/etc/vllm.yaml"]},
    ],
)
def test_vllm_is_recognized_in_arguments(container):
    info = inspect_container(container)
    assert info.engine == "vllm"
    assert info.shell_text == ""


@pytest.mark.parametrize(
    "container",
    [
        {"command": ["sh", "-c", "vllm serve m --port 8000"]},
        {"command": ["sh", "-c"], "args": ["vllm serve m"]},
        {"command": ["/bin/bash", "-lc", "source /venv/activate && exec vllm  serve \\\n  m"]},
        {"command": ["bash", "-o", "pipefail", "-ec", "vllm \\\n serve m | tee /log"]},
        {"command": ["tini", "--", "sh", "-c", 'python3 -m vllm.entrypoints.openai.api_server "$@"', "--"]},
        {"command": ["su", "vllm", "-c", "vllm serve m"]},
        {"args": ["-c", "python3 -mvllm.entrypoints.openai.api_server"]},
        {"command": ["bash", "-c", "ray start --head && vllm serve m"], "name": "ray-head"},
        {"command": ["bash", "-c", "bash multi-node-serving.sh leader; python3 -m vllm.entrypoints.openai.api_server"]},
    ],
)
def test_vllm_is_recognized_in_shell_text(container):
    info = inspect_container(container)
    assert info.engine == "vllm"
    assert info.shell_text
    assert info.connectors == frozenset()


@pytest.mark.parametrize(
    "container",
    [
        {"command": ["vllm", "bench", "serve"]},
        {"command": ["python3", "-m", "http.server"]},
        {"command": ["sh", "-c", "echo not-vllm serve"]},
        {"command": ["sh", "-c", "vllm server"]},
        {"command": ["sh", "-c", "# vllm serve m\nsleep infinity"]},
        {"command": ["bash", "/start.sh"]},
        {"image": "vllm/vllm-openai", "command": ["/start.sh"], "args": ["--model", "m"]},
        {"image": "vllm/vllm-openai", "command": ["huggingface-cli", "download", "m"]},
        {"image": "vllm/vllm-openai", "command": ["vllm", "bench", "serve", "--max-model-len", "9"]},
        {"image": "vllm/vllm-openai", "args": ["huggingface-cli", "download", "m"]},
        {
            "image": "lmcache/vllm-openai:latest",
            "command": ["/opt/venv/bin/lmcache_server"],
            "args": ["0.0.0.0", "8080"],
        },
        {"image": "vllm/vllm-openai", "command": ["sh", "-c", "ray start --head --block"]},
        {"image": "vllm/vllm-openai", "name": "ray-head"},
        {"image": "vllm/vllm-openai", "command": ["sh", "-c", "ray start --address=$LWS_LEADER_ADDRESS:6379 --block"]},
        {"image": "ghcr.io/llm-d/llm-d-inference-sim:v0.5", "args": ["--model", "m"]},
        {"image": "ghcr.io/llm-d/llm-d-inference-scheduler:v0.3", "args": ["--pool-name", "m"]},
        {"command": ["python3", "-m", "huggingfaceserver", "--backend=huggingface"]},
        {"image": "lmsysorg/sglang:latest", "args": ["--model", "m"]},
        {"image": "vllm/vllm-router", "args": ["--port", "80"]},
        {"image": "example/myvllmthing", "args": ["--model", "m"]},
        {"image": "envoyproxy/envoy"},
        {},
    ],
)
def test_everything_else_is_no_known_engine(container):
    assert inspect_container(container).engine == ""


@pytest.mark.parametrize(
    "container",
    [
        {"command": ["trtllm-serve", "m"]},
        {"command": ["trtllm-llmapi-launch", "trtllm-serve", "m"]},
        {"command": ["sh", "-c", "mpirun -n 8 trtllm-serve m"]},
        {"command": ["python3", "-m", "dynamo.trtllm", "--model", "m"]},
    ],
)
def test_tensorrt_llm_is_recognized(container):
    assert inspect_container(container).engine == "trtllm"


MINE = '{"kv_connector":"MyConnectorV1"}'


@pytest.mark.parametrize(
    "container",
    [
        {"command": [*SERVE, "--kv-transfer-config", MINE]},
        {"command": SERVE, "args": [f"--kv-transfer-config={MINE}"]},
        {"command": [*SERVE, "--kv_transfer_config", MINE]},
        {"command": [*SERVE, "--kv-transfer-config.kv_connector", "MyConnectorV1"]},
        {"command": [*SERVE, "--kv_transfer_config.kv_connector=MyConnectorV1"]},
        {"command": [*SERVE, "--kv-tr", MINE]},
        {"command": [*SERVE, "--kv-transfer-config", "{'kv_connector': 'MyConnectorV1'}"]},
        {"command": [*SERVE, "--kv-transfer-config", "$(CONFIG)"], "env": [{"name": "CONFIG", "value": MINE}]},
    ],
)
def test_a_connector_in_arguments_is_certain(container):
    assert inspect_container(container).connectors == {"MyConnectorV1"}


@pytest.mark.parametrize(
    "container",
    [
        {"command": ["sh", "-c", f"vllm serve m --kv-transfer-config '{MINE}'"]},
        {"command": ["sh", "-c", 'vllm serve m "$@"', "sh", "--kv-transfer-config", MINE]},
        {"command": ["sh", "-c", "vllm serve m $X"], "env": [{"name": "X", "value": f"--kv_transfer_config {MINE}"}]},
        {"command": SERVE, "env": [{"name": "X", "value": f"--kv_transfer_config {MINE}"}]},
    ],
)
def test_a_connector_elsewhere_is_only_mentioned(container):
    info = inspect_container(container)
    assert info.connectors == frozenset()
    assert info.mentioned == {"MyConnectorV1"}


@pytest.mark.parametrize("words", [['{"kv_connector": "mine"}'], ["{}", "--kv-transfer-config.kv_connector=mine"]])
def test_a_connector_of_any_name_is_read(words):
    assert inspect_container({"command": [*SERVE, "--kv-transfer-config", *words]}).connectors == {"mine"}


@pytest.mark.parametrize("flag", ["--kv-cache-dtype", "--kv-events-config", "x--kv-transfer-config"])
def test_other_flags_are_no_connector(flag):
    assert inspect_container({"command": [*SERVE, flag, MINE]}).connectors == frozenset()


def test_an_expansion_is_bounded():
    wide = [{"name": "X", "value": "y" * 2**20}]
    assert inspect_container({"command": [*SERVE, "$(X)$(X)"], "env": wide}).argv[-1] == "$(X)$(X)"


@pytest.mark.parametrize(
    ("container", "name"),
    [
        ({"image": "vllm/vllm-tpu:v0.13.2"}, "Google TPU"),
        ({"image": "opea/vllm-gaudi:1.3"}, "Intel Gaudi"),
        ({"image": "quay.io/ascend/vllm-ascend:v0.33.0"}, "Huawei Ascend"),
        ({"image": "x/y", "resources": {"limits": {"google.com/tpu": "8"}}}, "Google TPU"),
        ({"image": "x/y", "resources": {"requests": {"aws.amazon.com/neuroncore": "2"}}}, "AWS Neuron"),
        ({"image": "x/y", "resources": {"limits": {"nvidia.com/gpu": "1"}}}, ""),
        ({"image": "ghcr.io/llm-d/llm-d-xpu:v0.7"}, ""),
        ({"image": "rocm/vllm", "resources": None}, ""),
    ],
)
def test_accelerators_without_an_offloading_interface_are_named(container, name):
    assert inspect_container(container).accelerator == name


LONG = 2**20


@pytest.mark.parametrize(
    "container",
    [
        {"command": ["sh", "-c", "\n" * LONG]},
        {"command": ["sh", "-c", " " * LONG + "#"]},
        {"command": ["sh", "-c", "vllm serve m " + "PYTHONPATH=$PYTHONPATH" * (LONG // 22)]},
        {"command": ["sh", "-c", "vllm serve m " + "VLLM_PLUGINS=kvpool" * (LONG // 19)]},
        {"command": ["sh", "-c", "vllm serve m cpu_bytes_to_use" + " " * LONG]},
        {"command": ["sh", "-c", "vllm serve m " + "cpu_bytes_to_use" * (LONG // 16)]},
        {"command": ["sh", "-c", "vllm" + " " * LONG]},
        {"command": ["sh", "-c", "vllm serve m python " + "-a " * (LONG // 3)]},
        {"command": ["sh", "-c", "python -" + "I" * LONG]},
        {"command": ["sh"] * (LONG // 8)},
        {"command": [*SERVE, "--kv-transfer-config", "A" * LONG]},
        {"command": [*SERVE, "--kv-transfer-config", "AConnector" * (LONG // 10)]},
        {"command": ["$(A)" * (LONG // 4)], "env": [{"name": "A", "value": "b"}]},
        {"image": "vllm-" * (LONG // 5), "args": ["--model"]},
        {"image": "x/vllm-openai" + "-a" * LONG + "_:v1", "command": SERVE},
        {"image": "vllm-openai:" + "1." * LONG, "command": SERVE},
    ],
)
def test_the_work_grows_with_the_length_of_a_command_line_and_not_with_its_square(container):
    before = time.process_time()
    inspect_container(container)
    assert time.process_time() - before < 10


def test_every_launch_has_a_word_of_the_fast_check():
    names = [*engine_start._MODULES, *engine_start._PROGRAMS, *(" ".join(c) for c in engine_start._COMMANDS)]
    assert [n for n in names if not any(w in n for w in engine_start._WORDS)] == []
    assert all(
        inspect_container({"command": ["sh", "-c", f"exec python3 -m {m}"]}).engine for m in engine_start._MODULES
    )
