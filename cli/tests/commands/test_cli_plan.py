"""`kvpool plan` as users call it: fixed names in JSON, exit codes, the resource against the CRD."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

from kvpool_cli.main import main
from kvpool_operator.api.v1alpha1 import KVCachePool

CRD = Path(__file__).resolve().parents[3] / "crds" / "kvcachepools.kvpool.dev.yaml"
LOAD = ["--sessions", "2000", "--every", "60s", "--nodes", "4", "--tp", "4", "--gpus", "8xH100"]
LLAMA = ["plan", "--model", "meta-llama/Llama-3.3-70B-Instruct"]


def printed(capsys, *argv):
    status = main(argv)
    return status, capsys.readouterr().out


def test_the_fixed_names_are_there_for_model_and_tokens():
    command = [sys.executable, "-m", "kvpool_cli", "plan", "--model", "openai/gpt-oss-20b", "--tokens", "131072"]
    done = subprocess.run([*command, "-o", "json"], check=True, capture_output=True)
    found = json.loads(done.stdout)
    assert found["bytes_per_token"] == 49_152
    assert found["bytes_per_token_growing"] == 24_576
    assert found["block_bytes"] == 256 * 49_152
    assert found["session_bytes"] == 131_072 * 24_576 + 128 * 24_576


def test_a_config_file_gives_the_same_as_the_shipped_model(capsys, tmp_path):
    config = {
        "model_type": "llama", "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
        "hidden_size": 8192, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    given = json.loads(printed(capsys, "plan", "--config", str(tmp_path), "-o", "json")[1])
    shipped = json.loads(printed(capsys, *LLAMA, "-o", "json")[1])
    names = ("bytes_per_token", "bytes_per_token_growing", "block_bytes", "session_bytes")
    assert [given[name] for name in names] == [shipped[name] for name in names]


def test_text_shows_needs_gains_verdicts_and_assumptions_and_ends_with_1(capsys):
    status, text = printed(capsys, *LLAMA, *LOAD, "--drives", "1x7.68TB", "--network", "100")
    assert status == 1
    for part in ("320 KiB", "17.0 TB", "318 Gbit/s", "18.4 drive writes per day", "break-even", "Assumed", "6.5 GB/s"):
        assert part in text
    assert "\033[" not in text


def test_yaml_and_json_have_the_same_data(capsys):
    texts = [printed(capsys, *LLAMA, *LOAD, "-o", output)[1] for output in ("json", "yaml")]
    assert json.loads(texts[0]) == yaml.safe_load(texts[1])


@pytest.mark.parametrize(
    "more",
    [
        [],
        LOAD,
        [*LOAD, "--drives", "2x7.68TB", "--network", "100"],
        [*LOAD, "--drives", "2x7.68TB", "--drive-read", "14G", "--dwpd", "0.8", "--block-tokens", "2048"],
        ["--sessions", "1", "--tokens", "256", "--host-memory", "1Gi"],
    ],
)
@pytest.mark.parametrize("model", ["meta-llama/Llama-3.3-70B-Instruct", "Qwen/Qwen3.5-27B", "openai/gpt-oss-20b"])
def test_the_resource_is_valid_against_the_definition(capsys, model, more):
    _, text = printed(capsys, "plan", "--model", model, *more, "-o", "kvcachepool")
    found = yaml.safe_load(text)
    (version,) = yaml.safe_load(CRD.read_text())["spec"]["versions"]
    jsonschema.validate(found, version["schema"]["openAPIV3Schema"])
    pool = KVCachePool.model_validate({**found, "metadata": {**found["metadata"], "namespace": "kvpool-system"}})
    # what the models do not know, they would have dropped
    assert found["spec"].keys() <= {f.alias or name for name, f in type(pool.spec).model_fields.items()}


def test_the_resource_has_the_sizes_of_the_plan(capsys):
    arguments = [*LOAD, "--drives", "2x7.68TB", "--drive-read", "14G", "--network", "100", "--block-tokens", "1024"]
    _, text = printed(capsys, *LLAMA, *arguments, "-o", "kvcachepool")
    assert text.startswith("# Planned for meta-llama/Llama-3.3-70B-Instruct")
    spec = yaml.safe_load(text)["spec"]
    assert [tier["local"]["capacity"] for tier in spec["tiers"]] == ["1984Gi", "1984Gi"]
    assert spec["cache"]["maxBlockSize"] == "320Mi"
    assert spec["cache"]["admission"]["policy"] == "Budget"
    assert spec["failOpen"]["expectedBandwidth"] == "12500M"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "--model"),
        (["--model", "a", "--config", "b"], "--model"),
        (["--model", "no-such-model"], "does not ship"),
        (["--config", "/no/such/file"], "/no/such/file"),
        (["--model", "Qwen/Qwen3-8B", "--tokens", "many"], "tokens"),
        (["--model", "Qwen/Qwen3-8B", "--gpus", "H100"], "8xH100"),
        (["--model", "Qwen/Qwen3-8B", "--gpus", "8xB12"], "not known"),
        (["--model", "Qwen/Qwen3-8B", "--gpus", "2xH100", "--tp", "4"], "--tp"),
        (["--model", "Qwen/Qwen3-8B", "--tp", "0"], "--tp"),
        (["--model", "Qwen/Qwen3-8B", "--sessions", "0"], "--sessions"),
        (["--model", "Qwen/Qwen3-8B", "--sessions", "nan"], "--sessions"),
        (["--model", "Qwen/Qwen3-8B", "--sessions", "2", "--hit-rate", "2"], "--hit-rate"),
        (["--model", "Qwen/Qwen3-8B", "--routing", "round"], "--routing"),
    ],
)
def test_wrong_arguments_end_with_2_and_a_sentence(capsys, arguments, sentence):
    assert main(["plan", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert sentence in printed.err


def test_the_shipped_models_are_listed(capsys):
    status, text = printed(capsys, "plan", "--list-models")
    assert status == 0
    assert "deepseek-ai/DeepSeek-R1" in text.splitlines()


def test_a_model_of_the_hugging_face_cache_is_found_by_its_whole_name(capsys, tmp_path, monkeypatch):
    folder = tmp_path / "hub" / "models--acme--tiny" / "snapshots" / "abc"
    folder.mkdir(parents=True)
    config = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
    (folder / "config.json").write_text(json.dumps(config))
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    status, text = printed(capsys, "plan", "--model", "acme/tiny", "-o", "json")
    assert (status, json.loads(text)["bytes_per_token"]) == (0, 512)
    assert main(["plan", "--model", "../tiny"]) == 2
    assert main(["plan", "--model", "acme/other"]) == 2
