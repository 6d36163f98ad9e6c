"""Needs and gains of a workload: published loads, and how each input moves them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvpool_cli.errors import UsageError
from kvpool_cli.planner import catalog, units
from kvpool_cli.planner.attention import read_layout
from kvpool_cli.planner.demand import DAY, PEAK, Fleet, Workload, demand, gain, stored_bytes
from kvpool_cli.planner.gpus import find_gpu, prefill_rate
from kvpool_cli.planner.verdicts import judge

TB = 1e12
GB = 1e9
LLAMA_8B = read_layout(catalog.find("Llama-3.1-8B-Instruct").config)
LLAMA_70B = read_layout(catalog.find("Llama-3.3-70B-Instruct").config)
QWEN = read_layout(catalog.find("Qwen3-8B").config)
GPT_OSS = read_layout(catalog.find("gpt-oss-20b").config)
CHAT = Workload(tokens=20_000, new_tokens=600, sessions=2000, every_s=60)
FLEET = Fleet(
    nodes=4, gpus=8, tensor_parallel=4, drives=1, drive_bytes=int(7.68 * TB), drive_read=14 * GB, network=12.5 * GB,
    moved=0.75, host_memory=32 * 2**30,
)  # fmt: skip


def levels(layout, load, fleet, prefill=0.0):
    saved = gain(layout, load, fleet, prefill) if prefill else None
    return {v.subject: v.level for v in judge(layout, load, fleet, demand(layout, load, fleet, 256), saved, 256)}


def test_a_session_of_20000_tokens_takes_3_gigabytes():
    # 8B models: 79 blocks of 37.7 MB (Qwen3), or 89 blocks of 33.6 MB with the system prompt and the answers (Llama)
    assert 79 * QWEN.block_bytes(256) / GB == pytest.approx(3, rel=0.02)
    assert 89 * LLAMA_8B.block_bytes(256) / GB == pytest.approx(3, rel=0.01)
    assert QWEN.session_bytes(20_000) / GB == pytest.approx(3, rel=0.02)


def test_14_requests_a_second_of_20000_tokens_read_37_gigabytes_a_second():
    load = Workload(tokens=20_000, new_tokens=0, sessions=280, every_s=20)
    assert load.rate == 14
    assert demand(LLAMA_8B, load, Fleet(), 256).reads / GB == pytest.approx(37, rel=0.01)


def test_8_percent_writes_wear_ten_drives_3_6_times_a_day():
    # 37 GB/s of which 8 % are writes: 1,613 new tokens for each request of 20,000
    load = Workload(tokens=20_000, new_tokens=1_613, sessions=280, every_s=20)
    writes = demand(LLAMA_8B, load, Fleet(), 256).writes
    assert writes * DAY / (10 * 7.68 * TB) == pytest.approx(3.6, rel=0.1)


@pytest.mark.parametrize(
    ("layout", "tokens", "users"),
    [
        (LLAMA_8B, 131_072, 58_207),
        (LLAMA_70B, 131_072, 23_283),
        (LLAMA_8B, 4_096, 1_862_645),
        (GPT_OSS, 131_072, 310_137),
    ],
)
def test_users_of_a_petabyte(layout, tokens, users):
    assert 10**15 // layout.session_bytes(tokens) == users


def test_the_published_plan_of_a_70b_model_on_four_nodes():
    need, saved = demand(LLAMA_70B, CHAT, FLEET, 256), gain(LLAMA_70B, CHAT, FLEET, 12_000)
    assert need.requests == pytest.approx(33.3, abs=0.1)
    assert need.capacity / TB == pytest.approx(17.0, abs=0.1)
    assert (need.reads / GB, PEAK * need.reads / GB) == (pytest.approx(212, abs=1), pytest.approx(424, abs=1))
    assert 8 * need.network / GB == pytest.approx(1270, rel=0.01)
    assert need.writes / GB == pytest.approx(6.6, abs=0.1)
    assert need.writes * DAY / (4 * 7.68 * TB) == pytest.approx(18, abs=0.5)
    assert need.entries == pytest.approx(200_000, rel=0.05)
    assert need.index_bytes / 1e6 == pytest.approx(23, abs=0.5)
    assert need.host_memory == 64 * 2**30
    assert saved.compute_s == pytest.approx(1.62, abs=0.01)
    assert saved.load_bytes / FLEET.network == pytest.approx(0.51, abs=0.01)
    assert saved.break_even / GB == pytest.approx(3.9, abs=0.05)
    assert saved.engine_seconds == pytest.approx(53.9, abs=0.1)
    assert levels(LLAMA_70B, CHAT, FLEET, 12_000) == {
        "capacity": "ok", "reads": "fail", "network": "fail", "endurance": "fail", "compute": "ok", "dtype": "warn",
        "break-even, local drives": "ok", "break-even, network": "ok",
    }  # fmt: skip


def test_windows_are_read_once_and_stored_with_every_block_unless_only_the_last_are():
    load = Workload(tokens=20_000, new_tokens=1_000, sessions=10, every_s=10)
    every = demand(GPT_OSS, load, Fleet(), 256)
    last = demand(GPT_OSS, replace(load, window_blocks="last"), Fleet(), 256)
    assert every.writes == 2 * last.writes
    assert every.reads == last.reads == GPT_OSS.session_bytes(19_000)
    assert every.capacity / last.capacity == pytest.approx(2, rel=0.01)


def test_ended_sessions_are_kept_and_new_ones_are_written_whole():
    endless = Workload(tokens=1000, new_tokens=100, sessions=60, every_s=60, retain_s=600)
    ending = replace(endless, turns=10)
    assert (endless.kept_sessions, ending.kept_sessions) == (60, 60 + 60)
    a, b = demand(LLAMA_8B, endless, Fleet(), 256), demand(LLAMA_8B, ending, Fleet(), 256)
    assert b.capacity == 2 * a.capacity
    assert b.writes == pytest.approx(0.9 * a.writes + 0.1 * LLAMA_8B.session_bytes(1000))


def test_states_are_stored_for_each_step_of_the_first_prompt():
    layout = read_layout(catalog.find("Qwen3.5-27B").config)
    assert stored_bytes(layout, 20_000) == 20_000 * layout.bytes_per_token + 3 * layout.state_bytes


def test_a_tier_that_is_slower_than_prefill_fails_and_a_faster_one_does_not():
    slow = replace(FLEET, drives=1, drive_read=3 * GB)
    assert levels(LLAMA_70B, CHAT, slow, 12_000)["break-even, local drives"] == "fail"
    assert levels(LLAMA_70B, CHAT, slow, 6_000)["break-even, local drives"] == "ok"


def test_a_fleet_that_is_large_enough_has_no_negative_verdict():
    load = replace(CHAT, sessions=20)
    assert set(levels(LLAMA_70B, load, FLEET, 12_000).values()) == {"ok"}


def test_without_figures_of_the_fleet_nothing_is_judged():
    assert levels(LLAMA_70B, CHAT, Fleet()) == {}


def test_a_prompt_without_a_past_has_nothing_to_gain():
    assert levels(LLAMA_70B, replace(CHAT, new_tokens=20_000), Fleet())["reuse"] == "fail"


def test_a_block_above_the_default_size_is_reported():
    assert levels(LLAMA_70B, CHAT, Fleet()) == {}
    found = judge(LLAMA_70B, CHAT, Fleet(), demand(LLAMA_70B, CHAT, Fleet(), 1024), None, 1024)
    assert [(v.subject, v.level) for v in found] == [("block size", "warn")]
    assert "320Mi" in found[0].advice


def test_a_prefill_rate_is_estimated_from_the_gpu():
    assert prefill_rate(find_gpu("h100"), 70.6, 4) == pytest.approx(11_200, rel=0.01)
    with pytest.raises(UsageError, match="--prefill-rate"):
        find_gpu("abacus")


@pytest.mark.parametrize(("text", "tokens"), [("20000", 20_000), ("20k", 20_000), ("128Ki", 131_072)])
def test_tokens_are_read(text, tokens):
    assert units.tokens(text) == tokens


@pytest.mark.parametrize("text", ["", "0", "-1", "1e9", "20kb", "k", "nan"])
def test_what_is_no_number_of_tokens_is_refused(text):
    with pytest.raises(UsageError):
        units.tokens(text)


@pytest.mark.parametrize(
    ("text", "size"), [("7.68TB", 7_680_000_000_000), ("1Ti", 2**40), ("4GiB", 2**32), ("5g", 5 * 10**9)]
)
def test_sizes_are_read(text, size):
    assert units.size(text) == size


@pytest.mark.parametrize(("text", "seconds"), [("60", 60), ("90s", 90), ("1.5m", 90), ("24h", 86_400), ("7d", 604_800)])
def test_durations_are_read(text, seconds):
    assert units.seconds(text) == seconds


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (512, "512 B"), (33_554_432, "32 MiB"), (1.5 * 2**40, "1.50 TiB"), (2**60, "1024 PiB")],
)
def test_bytes_are_written_with_three_digits(value, text):
    assert units.binary(value) == text
