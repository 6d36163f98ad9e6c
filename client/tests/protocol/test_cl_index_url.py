"""Addresses of an index: every form is read, normalised without its secrets, and what is none is refused silently."""

from __future__ import annotations

import pytest

from kvpool.errors import ConfigError
from kvpool.protocol.index_url import IndexUrl, parse


@pytest.mark.parametrize(
    ("text", "expected", "public"),
    [
        ("redis://h", IndexUrl("single", False, (("h", 6379),)), "redis://h:6379/0"),
        ("redis://:pw@h:1/2\n", IndexUrl("single", False, (("h", 1),), db=2, password="pw"), "redis://h:1/2"),
        (
            "rediss://u:p%3A%2F@[fd00::1]:7/1?x=y#z",
            IndexUrl("single", True, (("fd00::1", 7),), db=1, username="u", password="p:/"),
            "rediss://[fd00::1]:7/1",
        ),
        (
            "redis+sentinel://u:p@a:1,b/main%20one/3",
            IndexUrl("sentinel", False, (("a", 1), ("b", 26379)), "main one", 3, "u", "p"),
            "redis+sentinel://a:1,b:26379/main%20one/3",
        ),
        (
            "rediss+sentinel://a/main",
            IndexUrl("sentinel", True, (("a", 26379),), "main"),
            "rediss+sentinel://a:26379/main/0",
        ),
        (
            "redis+cluster://a,[::1]:2",
            IndexUrl("cluster", False, (("a", 6379), ("::1", 2))),
            "redis+cluster://a:6379,[::1]:2",
        ),
        ("rediss+cluster://a/0", IndexUrl("cluster", True, (("a", 6379),)), "rediss+cluster://a:6379"),
        ("unix:///run/r.sock", IndexUrl("unix", False, (), path="/run/r.sock"), "unix:///run/r.sock"),
    ],
)
def test_every_form_is_read(text, expected, public):
    found = parse(text)
    assert found == expected
    assert found.public == public
    assert found.public == parse(found.public).public
    assert "p:/" not in repr(found)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "hunter2",
        "http://hunter2@h",
        "redis://h:hunter2/0",
        "redis://h:0/0",
        "redis://h:65536/0",
        "redis:///0",
        "redis://h/hunter2",
        "redis://a,hunter2/0",
        "redis://[::1/0",
        "redis://[::1]hunter2/0",
        "redis+sentinel://a,b",
        "redis+sentinel://a,b//0",
        "redis+sentinel://a/hunter/two",
        "redis+cluster://a/1",
        "redis+cluster://" + ",".join(["hunter2"] * 65),
        "unix://hunter2",
        "redis://" + "hunter2" * 1000,
        "redis://hunter 2/0",
    ],
)
def test_anything_else_is_refused_without_repeating_it(text):
    with pytest.raises(ConfigError, match=r"index\.url") as e:
        parse(text)
    assert "hunter" not in str(e.value)
