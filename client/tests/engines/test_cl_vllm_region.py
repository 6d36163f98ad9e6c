"""Which regions of vLLM's host tier a tier can address."""

from __future__ import annotations

import pytest

from kvpool.engines.vllm.self_test import region_problem


def table(rows: int, columns: int, code: str = "B") -> memoryview:
    size = memoryview(bytearray(8)).cast(code).itemsize  # type: ignore[call-overload]
    return memoryview(bytearray(rows * columns * size)).cast(code, (rows, columns))  # type: ignore[call-overload]


@pytest.mark.parametrize(("code", "size"), [("B", 64), ("b", 64), ("f", 256), ("d", 512)])
def test_items_of_a_table_may_have_any_size(code: str, size: int) -> None:
    assert region_problem(table(4, 64, code), size) == ""


@pytest.mark.parametrize(
    ("region", "size"),
    [
        (table(4, 64), 32),
        (table(4, 64), 128),
        (table(4, 64), 0),
        (table(4, 64, "f"), 64),
        (memoryview(bytearray(256)), 64),
        (table(4, 64).toreadonly(), 64),
    ],
    ids=["smaller chunks", "larger chunks", "no bytes", "items taken for bytes", "one dimension", "read-only"],
)
def test_other_regions_are_refused_with_a_sentence(region: memoryview, size: int) -> None:
    assert region_problem(region, size)
