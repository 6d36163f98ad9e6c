"""JSON patch and JSON merge patch, checked against other implementations and the RFC's own table."""

import copy

import jsonpatch as reference
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool_operator.k8s.json_patch import apply, diff
from kvpool_operator.k8s.merge_patch import merge_patch

_LEAF = st.none() | st.booleans() | st.integers(-3, 3) | st.text(alphabet="ab~/0", max_size=3)
_JSON = st.recursive(
    _LEAF,
    lambda c: st.lists(c, max_size=4) | st.dictionaries(st.text("ab~/", max_size=2), c, max_size=4),
    max_leaves=12,
)


@given(_JSON, _JSON)
def test_the_patch_leads_from_one_to_the_other(before, after):
    kept = copy.deepcopy(before)
    patch = diff({"x": before}, {"x": after})
    made = reference.apply_patch({"x": before}, copy.deepcopy(patch))
    # 1 == True in Python: compare what goes over the wire
    assert repr(made) == repr({"x": after}) or _canonical(made) == _canonical({"x": after})
    assert before == kept


def _canonical(value):
    import json

    return json.dumps(value, sort_keys=True)


@given(_JSON)
def test_equal_documents_need_no_patch(value):
    assert diff(value, copy.deepcopy(value)) == []


def test_appending_touches_nothing_else():
    assert diff({"a": [1, {"b": 2}]}, {"a": [1, {"b": 2}, 3]}) == [{"op": "add", "path": "/a/-", "value": 3}]


def test_a_named_object_that_is_inserted_leaves_the_others_as_they_are():
    ours, wait, engine = ({"name": n, "image": f"i/{n}"} for n in ("ours", "wait", "engine"))
    changed = engine | {"env": []}
    before, after = {"a": [wait, engine]}, {"a": [wait, ours, changed]}
    patch = diff(before, after)
    assert patch == [
        {"op": "add", "path": "/a/1", "value": ours},
        {"op": "add", "path": "/a/2/env", "value": []},
    ]
    assert reference.apply_patch(before, patch) == after


@given(st.lists(st.sampled_from("abc"), max_size=4), st.lists(st.sampled_from("abcd"), max_size=5), st.booleans())
def test_the_patch_of_named_objects_leads_from_one_to_the_other(before, after, changed):
    old = [{"name": n, "value": 1} for n in before]
    new = [{"name": n, "value": 2 if changed else 1} for n in after]
    assert reference.apply_patch({"x": old}, diff({"x": old}, {"x": new})) == {"x": new}


@pytest.mark.parametrize(
    ("target", "patch", "merged"),
    [  # the examples of RFC 7386, appendix A
        ({"a": "b"}, {"a": "c"}, {"a": "c"}),
        ({"a": "b"}, {"b": "c"}, {"a": "b", "b": "c"}),
        ({"a": "b"}, {"a": None}, {}),
        ({"a": "b", "b": "c"}, {"a": None}, {"b": "c"}),
        ({"a": ["b"]}, {"a": "c"}, {"a": "c"}),
        ({"a": "c"}, {"a": ["b"]}, {"a": ["b"]}),
        ({"a": {"b": "c"}}, {"a": {"b": "d", "c": None}}, {"a": {"b": "d"}}),
        ({"a": [{"b": "c"}]}, {"a": [1]}, {"a": [1]}),
        (["a", "b"], ["c", "d"], ["c", "d"]),
        ({"a": "b"}, ["c"], ["c"]),
        ({"a": "foo"}, None, None),
        ({"a": "foo"}, "bar", "bar"),
        ({"e": None}, {"a": 1}, {"e": None, "a": 1}),
        ([1, 2], {"a": "b", "c": None}, {"a": "b"}),
        ({}, {"a": {"bb": {"ccc": None}}}, {"a": {"bb": {}}}),
    ],
)
def test_merge_patch_of_the_rfc(target, patch, merged):
    before = copy.deepcopy(target)
    assert merge_patch(target, patch) == merged
    assert target == before


@given(_JSON, _JSON)
def test_apply_is_the_inverse_of_diff(before, after):
    kept = copy.deepcopy(before)
    assert _canonical(apply({"x": before}, diff({"x": before}, {"x": after}))) == _canonical({"x": after})
    assert before == kept
