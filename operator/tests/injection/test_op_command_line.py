"""Reading command lines: what starts an engine, and how it may be told of its connector."""

import pytest

from kvpool_operator.injection.command_line import Channel, inspect_container

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
    ],
)
def test_exec_form_is_extended_by_args(container):
    info = inspect_container(container)
    assert (info.engine, info.channel) == ("vllm", Channel.ARGS)
    assert not info.connector_present
    assert not info.hash_algo_present


@pytest.mark.parametrize(
    "container",
    [
        {"command": ["sh", "-c", "vllm serve m --port 8000"]},
        {"command": ["sh", "-c"], "args": ["vllm serve m"]},
        {"command": ["/bin/bash", "-lc", "source /venv/activate && exec vllm  serve \\\n  m"]},
        {"command": ["bash", "-o", "pipefail", "-ec", "vllm \\\n serve m | tee /log"]},
        {"command": ["tini", "--", "sh", "-c", 'python3 -m vllm.entrypoints.openai.api_server "$@"', "--"]},
        {"image": "vllm/vllm-openai", "command": ["/start.sh"], "args": ["--model", "m"]},
        {"image": "vllm/vllm-openai"},
        {"command": [*SERVE, "--config", "/etc/vllm.yaml"]},
        {"command": [*SERVE, "--config=/etc/vllm.yaml"]},
        {"command": [*SERVE, "--", "rest"]},
    ],
)
def test_where_args_are_unsafe_the_environment_tells(container):
    info = inspect_container(container)
    assert (info.engine, info.channel) == ("vllm", Channel.ENVIRONMENT)


@pytest.mark.parametrize(
    "container",
    [
        {"command": ["trtllm-serve", "m"]},
        {"command": ["vllm", "bench", "serve"]},
        {"command": ["python3", "-m", "http.server"]},
        {"command": ["sh", "-c", "echo not-vllm serve"]},
        {"command": ["sh", "-c", "vllm server"]},
        {"command": ["bash", "/start.sh"]},
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
        {"command": [*SERVE, "--kv-transfer-config", "{}"]},
        {"command": SERVE, "args": ["--kv-transfer-config={}"]},
        {"command": [*SERVE, "--kv_transfer_config", "{}"]},
        {"command": [*SERVE, "--kv-transfer-config.kv_connector", "X"]},
        {"command": [*SERVE, "--kv-tr", "{}"]},
        {"command": [*SERVE, "--kv-offloading-size", "4"]},
        {"command": ["sh", "-c", "vllm serve m --kv-transfer-config '{}'"]},
        {"command": ["sh", "-c", 'vllm serve m "$@"', "sh", "--kv-transfer-config", "{}"]},
        {"command": ["sh", "-c", "vllm serve m $X"], "env": [{"name": "X", "value": "--kv_transfer_config {}"}]},
    ],
)
def test_a_connector_of_the_user_is_seen(container):
    assert inspect_container(container).connector_present


@pytest.mark.parametrize("flag", ["--kv-cache-dtype", "--kv-events-config", "x--kv-transfer-config"])
def test_other_flags_are_no_connector(flag):
    assert not inspect_container({"command": [*SERVE, flag, "v"]}).connector_present


@pytest.mark.parametrize("flag", ["--prefix-caching-hash-algo", "--prefix_caching_hash_algo=sha256"])
def test_a_hash_of_the_user_is_seen(flag):
    assert inspect_container({"command": [*SERVE, flag]}).hash_algo_present
