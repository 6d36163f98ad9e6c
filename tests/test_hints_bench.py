"""The measurement of session hints: sessions are found again in a trace, and hints are worth something there."""

from __future__ import annotations

import json

from bench import hints, trace

from kvpool.protocol.hint import HintKind

SMALL = trace.make(3)[:1500]


def test_requests_that_continue_a_prompt_belong_to_its_session():
    blocks = [n.to_bytes(32, "big") for n in range(8)]
    first = trace.Request(3 * trace.BLOCK, blocks[:3], 0.0)
    other = trace.Request(2 * trace.BLOCK, [blocks[0], blocks[7]], 1.0)
    second = trace.Request(5 * trace.BLOCK, blocks[:5], 40.0)
    one, two, three = hints.sessions([first, other, second])
    assert one.session == three.session != two.session
    assert (one.pause, two.pause, three.pause) == (60.0, 0.0, 0.0)


def test_a_wrong_hint_says_the_opposite():
    turns = [hints.Turn(b"a" * 16, 60.0), hints.Turn(b"b" * 16, 0.0)] * 50
    right = hints.hints(turns, "both", 0.0, 1)
    assert right[:2] == [(HintKind.KEEP, 60.0), (HintKind.ENDED, 0.0)]
    wrong = hints.hints(turns, "both", 1.0, 1)
    assert wrong[:2] == [(HintKind.ENDED, 0.0), (HintKind.KEEP, 60.0)]


def test_hints_of_which_a_tenth_is_wrong_close_more_of_the_gap_than_none():
    turns = hints.sessions(SMALL)
    rates = {
        mode: hints.replay_hints(SMALL, turns, hints.hints(turns, mode, 0.1, 1), 1500)[0]
        for mode in ("none", "both", "blanket")
    }
    assert rates["both"] > rates["none"] + 1
    assert rates["blanket"] > rates["none"] - 0.5


def test_the_command_reads_a_trace_and_writes_its_figures(tmp_path, capsys):
    lines: list[str] = []
    ids: dict[bytes, int] = {}
    for r in SMALL[:300]:
        numbers = [ids.setdefault(k, len(ids)) for k in r.keys]
        lines.append(json.dumps({"timestamp": int(r.at * 1000), "input_length": r.tokens, "hash_ids": numbers}))
    (tmp_path / "trace.jsonl").write_text("\n".join(lines))
    arguments = ["--trace", str(tmp_path / "trace.jsonl"), "--capacities", "500", "--wrong", "0.1", "--processes", "1"]
    assert hints.main([*arguments, "--out", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "hints.json").read_text())
    assert report["statistics"]["requests"] == 300
    assert {row["mode"] for row in report["rows"]} == {"LRU", "optimum", *hints.MODES}
    assert "both" in capsys.readouterr().out
