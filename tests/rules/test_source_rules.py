"""`make check`: sizes, class names and words of the source stay within their limits."""

from __future__ import annotations

import ast

import source_rules


def test_no_limit_is_exceeded() -> None:
    assert source_rules.problems() == [], "see tests/rules/source_rules.py for the limits and for words to use instead"


def test_a_constructor_is_measured_by_parameters_and_callables() -> None:
    text = "class A:\n def __init__(self, a: int, *, b: Callable[[], int], c: 'Callable[[], None] | None') -> None: ..."
    (node,) = ast.parse(text).body
    assert isinstance(node, ast.ClassDef)
    assert source_rules.constructor(node) == (3, 2)


def test_a_banned_word_is_found_in_docstrings_comments_and_messages(tmp_path) -> None:
    path = tmp_path / "module.py"
    path.write_text(
        '"""What nobody tells of."""\nx = 1  # made anew\nraise ValueError("goes on in vain")\nfield = "told"\n'
    )
    texts = list(source_rules.prose(path, ast.parse(path.read_text())))
    assert sum(len(source_rules._BANNED.findall(text)) for text in texts) == 5
