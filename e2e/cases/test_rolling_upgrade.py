"""Fault 18: the release is upgraded and rolled back under load. No call fails, blocks stay, pools are not touched.

The other release is the same build under another tag: what is shown is the rollout, node by node, and that blocks
outlive it. Formats of other builds are shown by the tests of the header (client/tests/protocol/test_cl_formats.py).
"""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import system
from kubectl import helm_values, run, until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import loadpod
    from kubectl import Proxy

pytestmark = [pytest.mark.cluster, pytest.mark.full, pytest.mark.usefixtures("load_pool")]

OTHER = "other"
BLOCKS = 64
WINDOW_S = 30.0
ASKED = 0.8  # of the blocks that were had before, in any such window
FIRST = 50_000


@pytest.fixture
def other_release() -> Iterator[list[str]]:
    """helm's flags for images of another tag, which are on the nodes."""
    images = [os.environ["KVPOOL_OPERATOR_IMAGE"], os.environ["KVPOOL_SIDECAR_IMAGE"]]
    named = [f"{image.rsplit(':', 1)[0]}:{OTHER}" for image in images]
    for image, name in zip(images, named, strict=True):
        run("docker", "tag", image, name)
    run("e2e/cluster.sh", "load", *named, timeout=300)
    yield ["--set", f"operator.image.tag={OTHER}", "--set", f"sidecar.image.tag={OTHER}"]
    system.install()
    until("the first release runs again", lambda: tags() == {images[1].rsplit(":", 1)[1]} and system.settled(), 300)


def tags() -> set[str]:
    """Tags of the sidecars that run."""
    found = system.pods(f"kvpool.dev/pool={system.POOL},app.kubernetes.io/component=sidecar")
    return {p["spec"]["containers"][0]["image"].rsplit(":", 1)[1] for p in found}


class Reader:
    """Reads the same blocks again and again; when, and the share that was found each time."""

    def __init__(self, pod: loadpod.LoadPod) -> None:
        self._pod = pod
        self.shares: list[tuple[float, float]] = []
        self.errors: list[str] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="reader")
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                share = self._pod.get(FIRST, BLOCKS)["hits"] / BLOCKS
                self.shares.append((time.monotonic(), share))
            except Exception as e:
                self.errors.append(repr(e))
            self._stop.wait(0.2)

    def end(self) -> list[tuple[float, float]]:
        self._stop.set()
        self._thread.join(120)
        assert self.errors == []
        return self.shares


def test_an_upgrade_and_a_rollback_under_load_fail_no_call_and_keep_the_blocks(
    other_release: list[str], proxy: Proxy, load_pod: Callable[..., loadpod.LoadPod]
):
    node_a, node_b = system.workers()[:2]
    a, b = load_pod("upgrade-a", node_a), load_pod("upgrade-b", node_b)
    assert a.put(FIRST, BLOCKS)["ok"] == BLOCKS
    until("both find them", lambda: min(p.get(FIRST, BLOCKS)["hits"] for p in (a, b)) == BLOCKS, 60)
    first = tags()
    spec = system.pool()["spec"]
    for pod in (a, b):
        pod.order("traffic", depth=2, universe=100)
    readers = [Reader(a), Reader(b)]
    took: dict[str, float] = {}
    for what, expected, flags in (("upgrade", {OTHER}, other_release), ("rollback", first, None)):
        started = time.monotonic()
        if flags:
            chart = ["helm", "upgrade", "kvpool", "charts/kvpool", "-n", system.SYSTEM, "--wait", "--timeout=4m"]
            run(*chart, *helm_values(), *flags, timeout=260)
        else:
            run("helm", "rollback", "kvpool", "-n", system.SYSTEM, "--wait", "--timeout=4m", timeout=260)
        until(f"{what}: every sidecar is of that release", lambda e=expected: tags() == e, 240)
        until(f"{what}: the pool is Ready", system.settled, 240)
        took[what] = time.monotonic() - started
    shares = {name: reader.end() for name, reader in zip(("a", "b"), readers, strict=True)}
    for name, pod in (("a", a), ("b", b)):
        until(f"{name} finds all of them again", lambda p=pod: p.get(FIRST, BLOCKS)["hits"] == BLOCKS, 60)
    print({k: f"{v:.0f} s" for k, v in took.items()}, {k: _told(v) for k, v in shares.items()})
    found: dict[str, Any] = system.pool()["spec"]
    assert found == spec
    looks = sorted(look for found in shares.values() for look in found)
    lowest = min(_mean([s for at, s in looks if end - WINDOW_S < at <= end]) for end, _ in looks)
    print(f"lowest in any {WINDOW_S:.0f} s: {lowest:.3f}")
    assert lowest >= ASKED


def _mean(shares: list[float]) -> float:
    return sum(shares) / len(shares)


def _told(looks: list[tuple[float, float]]) -> str:
    shares = [share for _, share in looks]
    runs = [len(run) for run in "".join("x" if s < 1 else " " for s in shares).split()]
    return f"{len(shares)} looks, mean {_mean(shares):.3f}, with misses in a row: {runs}"
