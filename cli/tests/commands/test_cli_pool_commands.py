"""`kvpool plan check`, `kvpool plan --trace` and `kvpool savings` as users call them."""

from __future__ import annotations

import json

import pytest

from kvpool_cli.main import main

POOL = {
    "apiVersion": "kvpool.dev/v1alpha1",
    "kind": "KVCachePool",
    "metadata": {"namespace": "ai", "name": "chat"},
    "spec": {},
    "status": {
        "capacity": {"total": "10Ti"},
        "cache": {"hitRate": "0.10", "secondsSaved": 60, "models": [
            {"model": "Qwen/Qwen3-8B", "tokensAsked": 2_000_000, "tokensFound": 1_000_000},
        ]},
    },
}  # fmt: skip
PLANNED = ["--model", "Qwen/Qwen3-8B", "--sessions", "100"]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "pool.json"
    path.write_text(json.dumps({"kind": "List", "items": [POOL, {**POOL, "metadata": {"name": "batch"}}]}))
    return str(path)


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """A kubectl that knows one pool."""
    (tmp_path / "answer").write_text(json.dumps(POOL))
    (tmp_path / "kubectl").write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\n/bin/cat {tmp_path}/answer\n')
    (tmp_path / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def test_a_pool_of_the_cluster_is_compared_with_the_plan(capsys, cluster):
    assert main(["plan", "check", "ai/chat", *PLANNED, "-o", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["pool"] == "ai/chat"
    assert {v["subject"]: v["level"] for v in found["verdicts"]} == {
        "capacity": "ok", "hit rate": "warn", "time saved": "ok",
    }  # fmt: skip
    assert "get kvcachepools.kvpool.dev chat --output=json --namespace=ai" in (cluster / "asked").read_text()


def test_a_negative_verdict_ends_with_1(capsys, file):
    assert main(["plan", "check", "ai/chat", "--from", file, "--model", "Qwen/Qwen3-8B", "--sessions", "10000"]) == 1
    assert "raise tiers[].local.capacity" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["plan", "check", *PLANNED], "POOL"),
        (["plan", "check", "--from", "{file}", *PLANNED], "2 pools"),
        (["plan", "check", "other", "--from", "{file}", *PLANNED], "0 pools"),
        (["plan", "check", "chat", "--from", "/no/such", *PLANNED], "/no/such"),
        (["plan", "check", "chat", "--from", "{file}"], "--model"),
        (["savings", "--from", "{file}", "--prefill-rate", "fast"], "fast"),
        (["savings", "--from", "{file}", "--gpu", "abacus"], "abacus"),
        (["savings", "--from", "{file}", "--watts", "nan"], "--watts"),
        (["plan", "--model", "Qwen/Qwen3-8B", "--trace", "/no/such"], "/no/such"),
    ],
)
def test_wrong_arguments_end_with_2_and_a_sentence(capsys, file, arguments, sentence):
    assert main([argument.format(file=file) for argument in arguments]) == 2
    assert sentence in capsys.readouterr().err


def test_without_a_cluster_the_exit_code_is_3(capsys, cluster):
    (cluster / "kubectl").write_text("#!/bin/sh\necho 'Unable to connect to the server' >&2\nexit 1\n")
    assert main(["savings"]) == 3
    assert "Unable to connect" in capsys.readouterr().err


def test_savings_show_models_rates_and_their_sources(capsys, file):
    assert main(["savings", "--from", file, "--prefill-rate", "Qwen/Qwen3-8B=20000", "--gpu", "H100"]) == 0
    text = capsys.readouterr().out
    for part in ("ai/chat", "1,000,000", "20,000", "50", "60 s faster", "given"):
        assert part in text


def test_savings_of_all_pools_of_the_cluster_are_asked_for_together(capsys, cluster):
    assert main(["savings", "-A", "-o", "yaml"]) == 0
    assert "--all-namespaces" in (cluster / "asked").read_text()


def test_a_trace_is_replayed_into_rows_and_a_picture(capsys, tmp_path):
    rows = [{"timestamp": n, "input_length": 1024, "hash_ids": [n % 3, n % 3 + 10]} for n in range(30)]
    (tmp_path / "t").write_text("\n".join(map(json.dumps, rows)))
    assert main(["plan", "--model", "Qwen/Qwen3-8B", "--trace", str(tmp_path / "t"), "--sweep", "1Gi:4Gi"]) == 0
    text = capsys.readouterr().out
    assert "90.0%  ####" in text
    assert [line.split()[0:2] for line in text.splitlines() if "GiB  " in line][-1] == ["4", "GiB"]
