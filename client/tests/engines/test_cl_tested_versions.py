"""The one table of engine releases that client and operator use."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpool.engines import tested_versions
from kvpool.engines.tested_versions import described, is_tested


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("0.32.0", True),
        ("0.33.1", True),
        ("0.33.0+cu129", True),
        ("0.33.0.post1", True),
        ("0.33.1rc1.dev31+g0123abc", False),  # upstream's main branch after 0.33.0
        ("0.33.0rc1", False),
        ("0.99.0", False),
        ("", False),
        ("dev", False),
        ("0.33.0\n", False),
        ("0.33." + "9" * 5000, False),
    ],
)
def test_only_releases_of_the_table_are_tested(version: str, expected: bool) -> None:
    assert is_tested("vllm", version) is expected


def test_an_engine_that_is_not_in_the_table_has_no_tested_version() -> None:
    assert not is_tested("other", "0.33.0")


def test_the_documentation_names_the_tested_versions_of_vllm() -> None:
    docs = Path(__file__).parents[3] / "docs"
    (row,) = [t for t in (docs / "reference/compatibility.md").read_text().splitlines() if t.startswith("| vLLM |")]
    assert row.startswith(f"| vLLM | {described('vllm')}:")
    assert f"KVPool is tested with vLLM {described('vllm')} " in (docs / "how-to/engines/vllm.md").read_text()


@pytest.mark.parametrize(
    ("span", "expected"),
    [
        (((0, 30), (0, 34)), "0.30, 0.31, 0.32 and 0.33"),
        (((0, 5, 23), (0, 5, 24)), "0.5.23"),
        (((0, 5, 6), (0, 6)), "0.5.6 up to, not including, 0.6"),
    ],
)
def test_messages_name_the_releases(monkeypatch: pytest.MonkeyPatch, span: object, expected: str) -> None:
    monkeypatch.setitem(tested_versions.TESTED, "vllm", (span,))
    assert described("vllm") == expected
