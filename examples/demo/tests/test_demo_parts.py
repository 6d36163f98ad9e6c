"""The parts that decide: what is said, who serves it, what the numbers mean."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvpool_demo import picture, with_engine
from kvpool_demo.conversation import Shape, conversations, documents, to_tokens
from kvpool_demo.engines import MAX_MODEL_LEN
from kvpool_demo.play import Answer, play
from kvpool_demo.report import report
from kvpool_demo.results import Comparison, Results, summary
from kvpool_demo.routing import Visit, schedule
from kvpool_demo.statistics import Turn, agreement, percentile, sources
from kvpool_demo.with_engine import smaller
from rich.console import Console

ROOT = Path(__file__).resolve().parents[3]
SHAPE = Shape(users=2, rounds=3, system=40, opening=60, follow_up=10, answer=4)


def turn(user: int, number: int, tokens: tuple[int, ...] = (1, 2, 3), **changed: object) -> Turn:
    made = Turn(Visit(user, number, (user + number) % 3), 100, 0, {}, 1000.0, tokens)
    return replace(made, **changed)  # type: ignore[arg-type]


# -- conversation


def test_users_share_the_system_prompt_and_nothing_after_it():
    one, two = conversations("The quick brown fox. " * 50, SHAPE)
    assert one.system == two.system
    assert one.prompt([])[: len(one.system)] == two.prompt([])[: len(two.system)]
    assert one.says[0][:10] != two.says[0][:10]


def test_a_prompt_continues_the_one_before_with_its_answer():
    (talks, _) = conversations("Some text. " * 50, SHAPE)
    answer = [7, 8, 9, 10]
    first, second = talks.prompt([]), talks.prompt([answer])
    assert second[: len(first) + 4] == first + answer
    assert len(second) > len(first) + 4


def test_the_documents_are_long_enough_for_prompts_of_four_thousand_tokens():
    shape = Shape()
    talks = conversations(documents(ROOT), shape)
    answers = [[1] * shape.answer] * (shape.rounds - 1)
    assert len(talks[0].prompt([])) > 3500
    longest = max(len(c.prompt(answers)) for c in talks) + shape.answer
    assert 5000 < longest <= shape.longest <= MAX_MODEL_LEN


@given(st.text(min_size=1), st.integers(1, 3), st.integers(2, 4))
def test_lengths_do_not_depend_on_the_text(text: str, users: int, rounds: int):
    shape = replace(SHAPE, users=users, rounds=rounds)
    lengths = {len(c.prompt([[1] * shape.answer] * (rounds - 1))) for c in conversations(text, shape)}
    assert len(lengths) == 1
    assert lengths.pop() <= shape.longest


def test_a_token_is_a_byte_and_three():
    assert to_tokens("A\n") == [ord("A") + 3, 13]


def test_no_text_is_an_error():
    with pytest.raises(ValueError, match="no text"):
        conversations("", SHAPE)


# -- routing


@given(st.integers(1, 8), st.integers(2, 12), st.integers(3, 5), st.booleans())
def test_every_round_is_on_another_node_than_the_last(users: int, rounds: int, nodes: int, lost: bool):
    visits, gone = schedule(users, rounds, nodes, lost=lost)
    assert sorted((v.round, v.user) for v in visits) == [(r, u) for r in range(rounds) for u in range(users)]
    assert [v.round for v in visits] == sorted(v.round for v in visits)
    where = {(v.user, v.round): v.node for v in visits}
    for (user, number), node in where.items():
        assert 0 <= node < nodes
        assert number == 0 or node != where[user, number - 1]
    assert (gone is None) == (not lost)
    if lost:
        assert gone in {where[u, rounds - 2] for u in range(users)}, "somebody's last blocks must be on the lost node"
        assert gone not in {where[u, rounds - 1] for u in range(users)}


@pytest.mark.parametrize(("nodes", "rounds", "lost"), [(1, 3, False), (2, 3, True), (3, 1, True)])
def test_what_cannot_move_is_refused(nodes: int, rounds: int, lost: bool):
    with pytest.raises(ValueError, match="cannot move"):
        schedule(2, rounds, nodes, lost=lost)


# -- statistics


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0, 1))
def test_a_percentile_is_the_smallest_value_with_enough_below_it(values: list[float], share: float):
    found = percentile(values, share)
    assert sum(v <= found for v in values) >= share * len(values)
    assert sum(v < found for v in values) < max(share * len(values), 1)


def test_every_token_of_a_prompt_has_one_source():
    turns = [
        turn(0, 0, cached=60, tiers={"local": 20, "peer": 30}),
        turn(1, 0),
        turn(0, 1, cached=100, tiers={"shared": 90}),
    ]
    assert sources(turns) == {"local": 20, "peer": 30, "shared": 90, "engine": 20, "computed": 140}


def test_agreement_counts_rounds_and_tokens_up_to_the_first_difference():
    one = [turn(0, 0, (1, 2, 3)), turn(0, 1, (4, 5, 6))]
    other = [turn(0, 1, (4, 9, 6)), turn(0, 0, (1, 2, 3))]
    found = agreement(one, other)
    assert (found.rounds, found.same_rounds, found.tokens, found.same_tokens) == (2, 1, 6, 4)
    assert not found.identical
    assert agreement(one, one).identical


def test_a_missing_token_is_a_difference():
    assert not agreement([turn(0, 0, (1, 2, 3))], [turn(0, 0, (1, 2))]).identical


def test_runs_of_different_rounds_are_not_compared():
    with pytest.raises(ValueError, match="same rounds"):
        agreement([turn(0, 0)], [turn(0, 1)])


# -- play


def test_history_gives_every_round_the_same_prompt():
    visits, _ = schedule(2, 3, 3)
    talks = conversations("text " * 100, SHAPE)
    prompts: dict[str, list[list[int]]] = {"one": [], "other": [], "own": []}

    def answering(name: str, token: int):
        def ask(visit: Visit, prompt: list[int]) -> Answer:
            prompts[name].append(prompt)
            return Answer(1.0, 0, {}, (token,) * 4)

        return ask

    one = play(visits, talks, answering("one", 5))
    play(visits, talks, answering("other", 6), history=one)
    play(visits, talks, answering("own", 6))
    assert prompts["other"] == prompts["one"]
    assert prompts["own"] != prompts["one"]


def test_before_round_is_called_between_rounds():
    visits, _ = schedule(2, 3, 3)
    seen: list[object] = []
    ask = lambda visit, _: seen.append(visit.round) or Answer(1.0, 0, {}, ())  # noqa: E731
    play(visits, conversations("text", SHAPE), ask, before_round=lambda r: seen.append(f"before {r}"))
    assert seen == [0, 0, "before 1", 1, 1, "before 2", 2, 2]


def test_a_block_that_came_late_is_told():
    stayed = [turn(0, 0), turn(0, 1, cached=50)]
    assert with_engine._late(stayed, stayed) == ""
    assert "round 2 of user 0" in with_engine._late([turn(0, 0), turn(0, 1, cached=25)], stayed)


def test_what_is_played_in_float32_moves_too():
    assert smaller(Shape()).users == 2
    assert smaller(Shape()).rounds == 3
    assert smaller(SHAPE).users == 2


# -- results


def results(with_engine: bool = True, same: bool = True) -> Results:
    pool = [turn(u, r, cached=50 * r, tiers={"peer": 50 * r}, wait_ms=1000 - 400 * r) for r in (0, 1) for u in (0, 1)]
    if not with_engine:
        return Results("replay", 3, replace(SHAPE, rounds=2), pool, blocks_equal=True)
    none = [replace(t, cached=0, tiers={}, wait_ms=1000.0) for t in pool]
    other = [replace(t, tokens=t.tokens if same else (9,)) for t in pool]
    return Results(
        "vllm", 3, replace(SHAPE, rounds=2), pool, none, pool, lost="node-c",
        comparisons=[
            Comparison("pool = stayed", True, agreement(pool, other)),
            Comparison("pool = none", False, agreement(pool, [replace(t, tokens=(9,)) for t in none]), "a note"),
        ],
    )  # fmt: skip


def test_the_summary_has_what_is_promised():
    made = summary(results())
    assert made["engine"] == "vllm"
    assert (made["nodes"], made["users"], made["rounds"]) == (3, 2, 2)
    assert made["tokens_identical"] is True
    assert made["hit_rate"] == 0.25
    assert made["ttft_ms"]["pool"] == {"p50": 600.0, "p95": 1000.0}
    assert made["ttft_ms"]["none"] == {"p50": 1000.0, "p95": 1000.0}
    assert made["tokens_from"] == {"local": 0, "peer": 100, "shared": 0, "engine": 0, "computed": 300}
    json.dumps(made)


def test_one_different_token_where_it_must_not_be_is_not_identical():
    assert summary(results(same=False))["tokens_identical"] is False


def test_a_replay_says_nothing_of_tokens_and_times_of_an_engine():
    made = summary(results(with_engine=False))
    assert made["tokens_identical"] is None
    assert made["ttft_ms"]["pool"] == made["ttft_ms"]["none"] == {"p50": None, "p95": None}
    assert all(r["ttft_ms"]["pool"] == {"p50": None, "p95": None} for r in made["by_round"])
    assert made["load_ms"]["p95"] == 1000.0


def shown(what: Results) -> str:
    paper = io.StringIO()
    Console(width=80, file=paper).print(report(what))
    return paper.getvalue()


def test_the_table_tells_what_was_equal_and_what_was_not():
    text = shown(results())
    assert "pool = stayed" in text
    assert "yes" in text
    assert "for comparison" in text
    assert "a note" in text
    assert "node-c was stopped" in text
    assert "this must not be" not in text
    assert "this must not be" in shown(results(same=False))


def test_the_table_of_a_replay_says_that_no_engine_ran():
    text = shown(results(with_engine=False))
    assert "NO ENGINE RAN" in text
    assert "first token" not in text


@pytest.mark.parametrize("with_engine", [True, False])
def test_a_picture_is_drawn(tmp_path: Path, with_engine: bool):
    picture.draw(results(with_engine), tmp_path / "demo.png")
    assert (tmp_path / "demo.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
