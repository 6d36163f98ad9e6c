"""`status.cache`: tokens found over tokens asked for, summed over nodes, by model and window."""

from __future__ import annotations

from typing import Any

import pytest

from kvpool_operator.api.pool.status import MAX_MODELS
from kvpool_operator.pools.hit_rate import cache_status
from kvpool_operator.sidecars.status import SidecarStatus


def report(asked: int, found: int, model: str = "llama", recent: float = 0.5, **counters: Any) -> SidecarStatus:
    """A sidecar's status; `recent`: share of the hour's tokens that belongs to the last 5 minutes."""

    def window(name: str, share: float) -> dict[str, Any]:
        missing = int((asked - found) * share)
        misses = {"never-stored": missing} if missing else {}
        return {"window": name, "tokensAsked": int(asked * share), "tokensFound": int(found * share), "misses": misses}

    windows = [window("5m", recent), window("1h", 1)]
    cache = {"windows": windows, "models": [{"model": model, "windows": windows}]}
    return SidecarStatus.parse({"cache": cache, **counters})


@pytest.mark.parametrize(
    ("nodes", "asked", "found", "rate"),
    [
        ([], 0, 0, ""),
        ([report(0, 0)], 0, 0, ""),
        ([report(1000, 0), report(3000, 0)], 4000, 0, "0.00"),
        ([report(1000, 1000), report(1000, 0)], 2000, 1000, "0.50"),
        ([report(1000, 1000), report(1000, 1000)], 2000, 2000, "1.00"),
        ([report(100_000, 99_999)], 100_000, 99_999, "0.99"),
    ],
    ids=["no node", "nothing asked", "nothing found", "half", "all", "all but one"],
)
def test_tokens_are_summed_over_nodes(nodes, asked, found, rate):
    made = cache_status(nodes).model_dump(by_alias=True)
    assert (made["tokensAsked"], made["tokensFound"], made["hitRate"]) == (asked, found, rate)
    assert [w["window"] for w in made["windows"]] == ["5m", "1h"]
    assert [w["hitRate"] for w in made["windows"]] == [rate, rate]
    assert [w["tokensAsked"] for w in made["windows"]] == [asked // 2, asked]
    assert sum(made["misses"].values()) == asked - found


def test_models_are_kept_apart_and_the_busiest_come_first():
    made = cache_status([report(100, 50, "a"), report(300, 0, "b"), report(100, 100, "a")])
    assert [(m.model, m.tokens_asked, m.hit_rate) for m in made.models] == [("b", 300, "0.00"), ("a", 200, "0.75")]
    assert made.models[1].windows[0].tokens_asked == 100


def test_more_models_than_fit_are_summed_as_other():
    made = cache_status([report(n + 1, 0, f"model {n}") for n in range(100)] + [report(10_000, 0, "other")])
    assert len(made.models) == MAX_MODELS
    assert made.models[0].model == "model 99"
    assert made.models[-1].model == "other"
    assert sum(m.tokens_asked for m in made.models) == made.tokens_asked


def test_loads_have_a_rate_of_their_own():
    made = cache_status([report(1000, 0, hits={"local": 6}, misses={"deadline": 2})])
    assert (made.hit_rate, made.load_success_rate, made.load_failures) == ("0.00", "0.75", {"deadline": 2})
    assert cache_status([]).load_success_rate == ""


def test_time_saved_is_summed_and_may_be_negative():
    nodes = [{"saved_us": 9_000_000, "lost_us": 1_000_000}, {"lost_us": 20_500_000}, {"saved_us": "much"}, None]
    made = cache_status([SidecarStatus.parse({"cache": {"time": times}}) for times in nodes])
    assert made.seconds_saved == -13


@pytest.mark.parametrize(
    "cache",
    [
        None,
        [],
        {"windows": "5m"},
        {"windows": [None, {"window": 5}]},
        {"models": [{"model": 7}, None]},
        {"windows": [{"window": "1h", "tokensAsked": -1, "tokensFound": 5, "misses": []}]},
        {"windows": [{"window": "1h", "tokensAsked": True, "tokensFound": 2**60}]},
    ],
)
def test_values_that_make_no_sense_count_as_nothing(cache):
    made = cache_status([SidecarStatus.parse({"cache": cache})])
    assert (made.tokens_asked, made.tokens_found, made.hit_rate) == (0, 0, "")
