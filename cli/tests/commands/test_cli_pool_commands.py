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
        (["plan", "--from-pool", "other", "--from", "{file}"], "0 pools"),
        (["plan", "--from-pool", "chat", "--from", "{file}", "--nodes", "0"], "--nodes"),
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


def planned(capsys, file, *more):
    status = main(["plan", "--from-pool", "ai/chat", "--from", file, "-o", "json", *more])
    return status, json.loads(capsys.readouterr().out)


def with_status(tmp_path, **status):
    """A file with the pool and more of a status."""
    path = tmp_path / "more.json"
    path.write_text(
        json.dumps({**POOL, "spec": {"cache": {"blockTokens": 64}}, "status": {**POOL["status"], **status}})
    )
    return str(path)


def test_a_plan_starts_from_the_running_pool(capsys, tmp_path):
    models = [{"model": "Qwen3-8B", "tokensAsked": 72_000_000}, {"model": "gpt-oss-20b", "tokensAsked": 5}]
    file = with_status(tmp_path, nodes={"ready": 4}, cache={"models": models})
    _, found = planned(capsys, file, "--tokens", "20000", "--every", "30s")
    assert found["bytes_per_token"] == 147_456
    assert found["block_bytes"] == 64 * 147_456
    assert found["workload"]["sessions"] == pytest.approx(72_000_000 / 3600 / 20_000 * 30)
    assert (found["fleet"]["nodes"], found["fleet"]["drive_bytes"]) == (4, 10 * 2**40 // 4)
    notes = "; ".join(found["assumptions"])
    for words in ("ai/chat: most tokens of the last hour are of Qwen3-8B", "4 nodes serve", "1 requests/s"):
        assert words in notes


def test_what_is_given_is_not_taken_from_the_pool(capsys, tmp_path):
    file = with_status(tmp_path, nodes={"ready": 4})
    given = ("--model", "openai/gpt-oss-20b", "--nodes", "1", "--block-tokens", "256")
    given += ("--drives", "2x1TB", "--sessions", "9")
    _, found = planned(capsys, file, *given)
    assert found["bytes_per_token"] == 49_152
    assert found["block_bytes"] == 256 * 49_152
    assert (found["fleet"]["nodes"], found["fleet"]["drives"]) == (1, 2)
    assert not any("ai/chat" in note for note in found["assumptions"])


def test_the_read_rate_is_that_of_preflight(capsys, tmp_path):
    spec = {"tiers": [{"name": "nvme", "local": {"path": "/mnt/nvme"}}]}
    measured = {"measured": [{"tier": "nvme", "readMBps": 3100}]}
    path = tmp_path / "measured.json"
    path.write_text(json.dumps({**POOL, "spec": spec, "status": {**POOL["status"], "preflight": measured}}))
    _, found = planned(capsys, str(path))
    assert found["fleet"]["drive_read"] == 3.1e9


@pytest.mark.parametrize(
    ("models", "sentence"), [([], "requested tokens"), ([{"model": "own-llm", "tokensAsked": 9}], "--config")]
)
def test_a_pool_without_a_known_model_needs_one(capsys, tmp_path, models, sentence):
    file = with_status(tmp_path, cache={"models": models})
    assert main(["plan", "--from-pool", "chat", "--from", file]) == 2
    assert sentence in capsys.readouterr().err


def test_a_pool_of_the_cluster_is_read_by_its_name(capsys, cluster):
    assert main(["plan", "--from-pool", "ai/chat", "-o", "json", "--context", "lab"]) in (0, 1)
    asked = (cluster / "asked").read_text()
    assert "get kvcachepools.kvpool.dev chat --output=json --namespace=ai" in asked
    assert "--context=lab" in asked
