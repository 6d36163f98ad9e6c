"""The pure parts of `make bench BENCH=sessions`, and its client against a server on a real socket."""

from __future__ import annotations

import csv
import http.server
import io
import itertools
import json
import math
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.sessions import asked, counters, lmbenchmark, report
from bench.sessions.command import main, parse_targets
from bench.sessions.figures import Asked, by_round, differing, percentile, ratio, summary
from bench.sessions.measure import share
from bench.sessions.pairs import fillers
from bench.sessions.plan import Turn, plan
from bench.sessions.play import ask_chat, play
from bench.sessions.request import MAX_LINE, Server, read_events
from bench.sessions.shape import PRESETS, Shape
from bench.sessions.text import Session, sessions, to_tokens, words

SMALL = Shape(users=3, rounds=4, system=50, history=70, question=20, answer=5, qps=(2.0,))


def went(user=0, turn=0, ttft=0.5, answer=(1, 2, 3), **changes) -> Asked:
    made = Asked(Turn(user, turn, 0, 0.0), 100.0, 102.0, 0.0, ttft, 10, 4, len(answer), answer)
    return replace(made, **changes)


# -- who asks when ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("routing", ["sticky", "random", "migrating"])
def test_questions_come_evenly_and_each_user_waits_users_over_qps(routing):
    turns = plan(5, 4, 2, qps=2.5, routing=routing)
    assert [t.at for t in turns] == [n / 2.5 for n in range(20)]
    assert {(t.user, t.round) for t in turns} == {(u, r) for u in range(5) for r in range(4)}
    for user in range(5):
        mine = [t for t in turns if t.user == user]
        assert [t.round for t in mine] == [0, 1, 2, 3]
        assert all(math.isclose(b.at - a.at, 5 / 2.5) for a, b in itertools.pairwise(mine))


@pytest.mark.parametrize("nodes", [2, 3])
def test_routings_keep_their_word(nodes):
    def nodes_of(routing, user, seed=0):
        return [t.node for t in plan(6, 9, nodes, 1, routing, seed) if t.user == user]

    for user in range(6):
        assert len(set(nodes_of("sticky", user))) == 1
        moved = nodes_of("migrating", user)
        assert all(a != b for a, b in itertools.pairwise(moved))
    assert {n for user in range(6) for n in nodes_of("sticky", user)} == set(range(nodes))
    chance = [nodes_of("random", user) for user in range(6)]
    assert {n for mine in chance for n in mine} == set(range(nodes))
    assert chance == [nodes_of("random", user) for user in range(6)]
    assert chance != [nodes_of("random", user, seed=1) for user in range(6)]


def test_nobody_migrates_on_one_node():
    with pytest.raises(ValueError, match="cannot migrate"):
        plan(1, 2, 1, 1, "migrating")


def test_shapes_are_checked_and_the_full_preset_is_the_published_one():
    full = PRESETS["full"]
    assert (full.users, full.rounds, full.system) == (80, 10, 1000)
    assert 4000 <= full.history <= 20_000
    assert 100 <= full.answer <= 200
    assert (min(full.qps), max(full.qps)) == (1, 7)
    assert SMALL.plays() == [("migrating", 2.0), ("sticky", 2.0), ("random", 2.0)]
    assert replace(SMALL, qps=(1.0, 3.0), routings=("migrating",)).plays() == [("migrating", 1.0), ("migrating", 3.0)]
    for wrong in ({"users": 0}, {"qps": ()}, {"qps": (0.0,)}, {"routings": ("nearest",)}, {"prefix": -1}):
        with pytest.raises(ValueError, match=r"above 0|no routing"):
            replace(SMALL, **wrong)


# -- what is said ----------------------------------------------------------------------------------------------------


def test_a_prompt_holds_all_that_was_said_and_is_as_long_as_the_shape_says():
    made = sessions(SMALL, "run", in_bytes=True)
    answers = [(7,) * SMALL.answer] * 3
    before: list[int] = []
    for turn in range(4):
        prompt = made[1].tokens(answers[:turn])
        assert prompt[: len(before)] == before
        assert len(prompt) == 50 + 70 + (turn + 1) * 20 + turn * 5
        before = prompt + list(answers[0])
    assert len(before) == SMALL.longest
    assert made[0].system == made[1].system
    assert made[0].says != made[1].says


def test_two_runs_share_no_prefix_and_the_same_run_is_the_same_text():
    one, other = (sessions(SMALL, run, in_bytes=True)[0].tokens([]) for run in ("x", "y"))
    assert one[:32] != other[:32]
    assert sessions(SMALL, "x", in_bytes=True)[0].tokens([]) == one


def test_words_are_counted_in_the_unit_that_was_asked_for():
    assert len(words("s", 99, in_bytes=True)) == 99 == len(to_tokens(words("s", 99, in_bytes=True)))
    assert len(words("s", 99, in_bytes=False).split()) == 99
    assert len(sessions(SMALL, "x", in_bytes=False)[0].says[0].split()) == 90


def test_a_chat_alternates_and_ends_with_a_question():
    messages = Session("be brief", ("one", "two", "three")).messages(["first"])
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "user"]
    assert [m["content"] for m in messages] == ["be brief", "one", "first", "two"]


# -- numbers ---------------------------------------------------------------------------------------------------------


def test_percentiles_are_nearest_ranks():
    values = [float(n) for n in range(20, 0, -1)]
    assert [percentile(values, share) for share in (0.05, 0.5, 0.95, 0.99, 1.0)] == [1, 10, 19, 20, 20]
    with pytest.raises(ValueError, match="no values"):
        percentile([], 0.5)


def test_a_ratio_is_the_median_of_pairs():
    assert ratio([1.0, 8.0, 3.0], [1.0, 2.0, 2.0]) == 1.5
    assert ratio([1.0, 4.0], [1.0, 2.0]) == 1.5
    for ones, others in (([], []), ([1.0], [])):
        with pytest.raises(ValueError):  # noqa: PT011 - zip has its own words
            ratio(ones, others)


def test_tokens_differ_from_the_first_difference_on():
    reference = {(0, 0): (1, 2, 3, 4), (0, 1): (1, 2, 3, 4), (1, 0): (9,)}
    same = went(answer=(1, 2, 3, 4))
    assert differing([same], reference) == (0, 4)
    assert differing([went(answer=(1, 5, 3, 4))], reference) == (3, 4)
    assert differing([went(answer=(1, 2))], reference) == (2, 4)
    assert differing([same, went(turn=1, answer=(2, 2, 3, 4)), went(user=1, error="gone")], reference) == (4, 8)
    assert differing([went(user=5)], reference) == (0, 0)


def test_a_summary_leaves_errors_out_of_the_times_and_counts_them():
    turns = [went(ttft=1.0), went(turn=1, ttft=0.2), went(user=1, ttft=3.0, finished=104.0), went(turn=2, error="x")]
    made = summary(turns)
    assert (made["turns"], made["errors"]) == (4, 1)
    assert made["ttft_ms"] == {"p50": 1000.0, "p95": 3000.0, "p99": 3000.0}
    assert made["ttft_later_ms"]["p50"] == 200.0
    assert made["output_tokens_per_s"] == 9 / 4
    assert made["hit_rate"] == 0.4
    assert by_round(turns) == {1: 1000.0, 2: 200.0}
    nothing = summary([went(error="x", cached_tokens=None)])
    assert nothing["ttft_ms"]["p50"] is None is nothing["hit_rate"] is nothing["output_tokens_per_s"]


def test_the_csv_has_lmbenchmarks_columns_and_only_answered_turns(tmp_path):
    turns = [went(user=1, turn=1, ttft=0.25), went(user=0, turn=0), went(user=0, turn=1, error="x")]
    lmbenchmark.write(turns, tmp_path / "turns.csv")
    found = list(csv.DictReader((tmp_path / "turns.csv").read_text().splitlines()))
    assert list(found[0]) == [
        "prompt_tokens", "generation_tokens", "ttft", "generation_time", "user_id", "question_id", "launch_time",
        "finish_time",
    ]  # fmt: skip
    assert [(row["user_id"], row["question_id"], row["ttft"]) for row in found] == [
        ("1", "1", "0.5"),
        ("2", "2", "0.25"),
    ]
    assert float(found[1]["generation_time"]) == 1.75


def test_counters_are_summed_over_engines_and_tiers_are_taken_out_of_what_came_from_outside():
    page = """# HELP vllm:prompt_tokens_by_source_total x
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="local_compute"} 100.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="local_cache_hit"} 32.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="external_kv_transfer"} 60.0
kvpool:loaded_tokens_total{engine="0",tier="peer"} 25.0
kvpool:missed_blocks_total{engine="0",reason="late"} 2.0
vllm:request_queue_time_seconds_sum{engine="0"} 0.5
vllm:request_queue_time_seconds_count{engine="0"} 4.0
vllm:request_queue_time_seconds_bucket{engine="0",le="0.3"} 4.0
other 5
"""
    before, after = counters.read([page]), counters.read([page, page])
    grown = counters.grown(before, after)
    assert counters.tokens_from(grown) == {"engine": 32, "outside": 35, "computed": 100, "peer": 25}
    assert counters.queueing_ms(grown) == 125.0
    assert counters.missed(grown) == {"late": 2}
    assert counters.queueing_ms(counters.grown(before, before)) is None
    assert counters.tokens_from(counters.read(["nothing here"])) == {}


# -- what is asked ---------------------------------------------------------------------------------------------------


def whole(**changes):
    kind = {"turns": 2, "errors": 0, "ttft_ms": [1.0], "p50_ms": 1.0}
    pairs = {
        "migrated": {**kind, "tokens_from": {"engine": 0, "computed": 80, "peer": 4096}},
        "sticky": {**kind, "tokens_from": {"engine": 0, "computed": 80, "local": 4096}},
        "recompute": {**kind, "tokens_from": {"engine": 0, "computed": 8352}},
        "migrated_over_sticky": 1.1, "migrated_over_recompute": 0.2, "differing_tokens": 0, "compared_tokens": 32,
    }  # fmt: skip
    ours = {"plays": [], "pairs": pairs, "migrating_later_ms": {"errors": 0, "p50": 50.0, "p95": 90.0}}
    other = {"plays": [], "migrating_later_ms": {"errors": 0, "p50": 60.0, "p95": 80.0}}
    overhead = {"pairs": 2, "ttft_ratio": 1.02, "tokens_per_s_ratio": 0.9, "differing_tokens": 0, "compared_tokens": 9}
    overhead["ttft_ratios"] = [0.94, 1.1]
    return {"systems": {"kvpool": ours, "vllm-fs": other}, "overhead": overhead, **changes}


def test_each_promise_is_judged_by_its_own_figure():
    assert [row.met for row in asked.rows(whole())] == [True, True, True, False, True, False, True]
    assert asked.rows(whole())[4].got == "+2.0 % (median of 2 pairs, from -6 to +10 %)"
    bad = whole()
    pairs = bad["systems"]["kvpool"]["pairs"]
    pairs.update(migrated_over_sticky=1.16, migrated_over_recompute=0.36, differing_tokens=1)
    bad["overhead"]["ttft_ratio"] = 1.031
    assert [row.met for row in asked.rows(bad)] == [False, False, True, False, False, False, False]
    assert "NO" in report.asked_table(asked.rows(bad))


def test_what_was_not_measured_is_neither_met_nor_missed():
    assert [row.met for row in asked.rows({"systems": {}, "overhead": None})] == [None] * 7
    elsewhere = whole()
    elsewhere["systems"]["kvpool"]["pairs"]["sticky"]["tokens_from"] = {"engine": 0, "outside": 4096}
    assert asked.rows(elsewhere)[0].met is None  # served from host memory: no comparison of tiers
    failed = whole()
    failed["systems"]["vllm-fs"]["migrating_later_ms"]["errors"] = 1
    assert [row.met for row in asked.rows(failed)][2:4] == [None, None]
    fewer = whole()
    fewer["systems"]["none"] = {"plays": [], "why_not": "out of time"}
    assert asked.rows(fewer)[2].met is True
    assert "not measured: none" in asked.rows(fewer)[2].got


def test_on_a_slow_machine_every_system_has_its_share_of_the_time():
    assert [share(600, number, 4) for number in range(4)] == [150, 300, 450, 600]


def test_the_table_says_what_was_left_out_and_why_a_system_is_missing():
    shown = report.plays_table({"a": {"why_not": "no room"}, "b": {"left_out": ["sticky", "random"], "plays": []}})
    assert "a: not measured: no room" in shown
    assert "b: sticky, random left out" in shown


@pytest.mark.parametrize(("pairs", "prefix", "host", "more"), [(1, 100, 250, 3), (3, 100, 250, 1), (4, 100, 250, 0)])
def test_enough_else_is_asked_to_empty_the_host_memory_between_two_turns(pairs, prefix, host, more):
    assert fillers(pairs, prefix, host) == more
    assert (pairs - 1 + more) * prefix >= host


# -- the client ------------------------------------------------------------------------------------------------------


def event(**fields) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


class Ticks:
    """A clock that is read once for the first token and once for the end."""

    def __init__(self) -> None:
        self.now = 10.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


def test_the_first_token_counts_even_where_it_is_no_whole_character():
    stream = io.BytesIO(
        event(choices=[{"text": "", "token_ids": None}])
        + event(choices=[{"text": "", "token_ids": [231]}])
        + event(choices=[{"text": "é", "token_ids": [172, 9]}])
        + event(choices=[], usage={"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": None})
        + b"data: [DONE]\n"
    )
    reply = read_events(stream, 10.0, Ticks())
    assert (reply.ttft, reply.seconds) == (1.0, 2.0)
    assert reply.answer == (231, 172, 9)
    assert (reply.prompt_tokens, reply.answer_tokens, reply.cached_tokens) == (7, 3, None)


@pytest.mark.parametrize(
    "stream",
    [
        b"",
        event(choices=[{"text": "a"}]),
        b"data: [DONE]\n",
        event(error={"message": "no"}) + b"data: [DONE]\n",
        b"data: {" + b" " * MAX_LINE,
        b"data: no json\n",
    ],
)
def test_an_answer_that_is_cut_off_or_no_answer_is_an_error(stream):
    with pytest.raises(ValueError):  # noqa: PT011 - json has its own words
        read_events(io.BytesIO(stream), 0.0)


class Chat(http.server.BaseHTTPRequestHandler):
    """Answers a chat with what it was told last; a request for `fail` gets a 500."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        last = asked["messages"][-1]["content"]
        self.server.prompts.append([m["content"] for m in asked["messages"]])
        self.send_response(500 if last == "fail" else 200)
        self.end_headers()
        if last != "fail":
            self.wfile.write(event(choices=[{"delta": {"role": "assistant", "content": ""}}]))
            self.wfile.write(event(choices=[{"delta": {"content": f"re {last}"}}]))
            usage = {"prompt_tokens": 3, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 2}}
            self.wfile.write(event(choices=[], usage=usage) + b"data: [DONE]\n\n")

    def log_message(self, *_) -> None:
        pass


@pytest.fixture
def chat():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Chat)
    server.prompts = []
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_run_asks_every_question_with_the_answers_before_it(chat):
    server = Server(f"http://127.0.0.1:{chat.server_port}/v1", "m")
    said = [Session("sys", (f"{user}-1", f"{user}-2")) for user in range(3)]
    done = play(plan(3, 2, 2, 50.0, "migrating"), said, [server, server], ask_chat(4))
    assert [(a.turn.user, a.turn.round) for a in done] == [(u, r) for r in range(2) for u in range(3)]
    assert all(a.answer == f"re {a.turn.user}-{a.turn.round + 1}" and a.cached_tokens == 2 for a in done)
    assert sorted(p for p in chat.prompts if len(p) == 4) == [
        ["sys", f"{u}-1", f"re {u}-1", f"{u}-2"] for u in range(3)
    ]


def test_with_a_history_prompts_hold_its_answers(chat):
    server = Server(f"http://127.0.0.1:{chat.server_port}/v1", "m")
    history = {(0, 0): "as before"}
    play(plan(1, 2, 1, 50.0, "sticky"), [Session("s", ("a", "b"))], [server], ask_chat(4), history=history)
    assert chat.prompts[-1] == ["s", "a", "as before", "b"]


def test_a_failed_turn_is_an_error_and_so_are_the_users_later_ones(chat):
    server = Server(f"http://127.0.0.1:{chat.server_port}/v1", "m")
    said = [Session("s", ("a", "fail", "c")), Session("s", ("a", "b", "c"))]
    done = play(plan(2, 3, 1, 50.0, "sticky"), said, [server], ask_chat(4))
    assert [(a.turn.user, a.turn.round) for a in done if a.error] == [(0, 1), (0, 2)]
    assert "500" in done[2].error
    late = play(plan(1, 1, 1, 1.0, "sticky"), said, [server], ask_chat(4), limit_s=-1.0)
    assert "out of time" in late[0].error


def test_targets_have_names_and_urls():
    assert parse_targets(["http://a/v1,http://b/v1"]) == {"target": ["http://a/v1", "http://b/v1"]}
    assert parse_targets(["pool=http://a/v1", "none=https://b/v1"]) == {
        "pool": ["http://a/v1"],
        "none": ["https://b/v1"],
    }
    for wrong in (["a,b"], [""], ["x=http://a", "x=http://b"], ["../x=http://a"]):
        with pytest.raises(ValueError, match="--targets"):
            parse_targets(wrong)


def test_a_whole_run_against_targets_writes_its_results(chat, tmp_path, capsys):
    url = f"http://127.0.0.1:{chat.server_port}/v1"
    options = ["--preset", "try", "--model", "m", "--qps", "50", "--out", str(tmp_path), "--no-picture"]
    assert main([*options, "--targets", f"here={url},{url}"]) == 0
    result = json.loads((tmp_path / "sessions.json").read_text())
    (run,) = result["systems"]["here"]["plays"]
    assert (run["turns"], run["errors"], run["routing"]) == (4, 0, "migrating")
    assert len((tmp_path / "sessions" / "here-migrating-50.csv").read_text().splitlines()) == 5
    assert "migrating" in capsys.readouterr().out


class Silent(http.server.BaseHTTPRequestHandler):
    """Takes a question and never answers it."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked.set()
        self.server.over.wait(60)

    def log_message(self, *_) -> None:
        pass


@pytest.fixture
def silent():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Silent)
    server.asked, server.over = threading.Event(), threading.Event()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.over.set()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_ends_at_once_and_writes_what_it_has(silent, tmp_path, number):
    url = f"http://127.0.0.1:{silent.server_port}/v1"
    command = [sys.executable, "-m", "bench", "sessions", "--preset", "try", "--model", "m", "--no-picture"]
    root = Path(__file__).parent.parent
    with subprocess.Popen(
        [*command, "--dir", str(tmp_path), "--out", str(tmp_path / "out"), "--targets", f"here={url},{url}"],
        cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # tests in a shell's background ignore it
    ) as run:  # fmt: skip
        assert silent.asked.wait(60)
        run.send_signal(number)
        out, said = run.communicate(timeout=60)
    assert run.returncode == 130, said
    assert "interrupted" in said
    assert "system" in out
    assert json.loads((tmp_path / "out" / "sessions.json").read_text())["systems"]["here"]["plays"] == []
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


_STARTS_A_SERVER = """
import sys, time
from pathlib import Path
from bench.sessions.processes import Child
folder = Path(sys.argv[1])
command = ["sh", "-c", f"sleep 300 & echo $! > {folder}/pid; wait"]
child = Child("server", command, folder / "log", {"PATH": "/bin:/usr/bin"})
child.wait_ready(lambda: (folder / "pid").exists() and (folder / "pid").read_text().strip() != "", 60)
print("ready", flush=True)
if sys.argv[2] == "end":
    child.end()
else:
    time.sleep(300)
"""


@pytest.mark.parametrize("how", ["end", "killed"])
def test_what_a_server_started_does_not_outlive_the_benchmark(tmp_path, how):
    root = Path(__file__).parent.parent
    with subprocess.Popen(
        [sys.executable, "-c", _STARTS_A_SERVER, str(tmp_path), how], cwd=root, stdout=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout.readline() == "ready\n"
        grandchild = int((tmp_path / "pid").read_text())
        if how == "killed":
            assert Path(f"/proc/{grandchild}").exists()
            run.kill()
        run.wait(60)
        deadline = time.monotonic() + 30
        while running(grandchild) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not running(grandchild)


def running(pid: int) -> bool:
    """A zombie has ended: whoever must collect it is not ours."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
