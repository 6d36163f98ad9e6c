"""Properties of the injection that hold for any pod."""

from __future__ import annotations

import copy

from hypothesis import given, settings
from hypothesis import strategies as st
from op_injection import (
    INJECTION,
    KVBM,
    NIXL,
    pod_of,
)

from kvpool_operator.injection.annotations import ENGINES, parse_annotations
from kvpool_operator.injection.flags import has_flag
from kvpool_operator.injection.mutator import inject
from kvpool_operator.injection.skip import Skip

WORDS = st.sampled_from(
    [
        *("vllm", "serve", "sglang", "lmcache", "server", "python3", "-m", "dynamo.vllm", "sglang.launch_server", "sh"),
        *("-c", "--kv-transfer-config", NIXL, KVBM, "--page-size", "--l2-adapter", "--", "--config", "m", "{"),
        *("vllm serve m", "sglang serve m $KVPOOL_ENGINE_ARGS", "lmcache server", "--hicache-storage-backend=file"),
    ]
)


def test_the_engines_that_were_chosen_first_stay_the_ones():
    pod = pod_of({"command": ["vllm", "serve"]}, {"image": "busybox"})
    once = inject(pod, parse_annotations(pod), INJECTION).pod
    once["spec"]["containers"][1]["command"] = ["vllm", "serve"]  # another webhook
    assert inject(once, parse_annotations(once), INJECTION).pod == once


@settings(deadline=None, max_examples=300)
@given(
    st.lists(st.lists(WORDS, max_size=6), min_size=1, max_size=2),
    st.lists(WORDS, max_size=4),
    st.sampled_from(ENGINES),
)
def test_whatever_a_pod_says_it_is_injected_once_or_left_alone(commands: list[list[str]], args: list[str], engine: str):
    pod = pod_of(*({"command": c, "args": args} for c in commands), engine=engine)
    before = copy.deepcopy(pod)
    try:
        result = inject(pod, parse_annotations(pod), INJECTION)
    except Skip as skip:
        reason = str(skip)
    else:
        reason = ""
        assert inject(result.pod, parse_annotations(result.pod), INJECTION).pod == result.pod
        for old, new in zip(pod["spec"]["containers"], result.pod["spec"]["containers"], strict=True):
            assert (new["command"], new["args"]) == (old["command"], args)
    assert pod == before
    assert reason == "" or ": " in reason


def test_flags_are_recognised_as_argparse_does():
    known = frozenset({"--page-size", "--page"})
    assert has_flag(["--page-size=1"], "--page-size")
    assert has_flag(["--page-si", "1"], "--page-size")
    assert not has_flag(["--page", "1"], "--page-size", known)
    assert not has_flag(["page-size", "--p"], "--page-size")
