"""`helm test` of the installed release: it passes with a pool that works, says what it did, and fails without one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import system
from kubectl import CommandError, kubectl, run

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.cluster, pytest.mark.full]

NAMESPACE = "team-a"


@pytest.fixture(autouse=True)
def afterwards() -> Iterator[None]:
    yield
    kubectl("delete", "pod", "-A", "-l", "app.kubernetes.io/component=test", "--wait=true", "--timeout=60s")
    system.install()


def helm_test(pool: str) -> str:
    system.install("--set", f"test.pool={pool}", "--set", f"test.namespace={NAMESPACE}")
    return run("helm", "test", "kvpool", "-n", system.SYSTEM, "--timeout=3m", timeout=400)


def log(name: str, namespace: str) -> str:
    return kubectl("-n", namespace, "logs", f"kvpool-test-{name}")


def test_it_brings_a_block_through_the_pool_and_asks_for_an_injection(load_pool: str):
    shown = helm_test(load_pool)
    assert shown.count("Phase:          Succeeded") == 2, shown
    told = log("webhook", system.SYSTEM)
    assert f"dry run: a pod in {NAMESPACE} would be injected with pool {load_pool}" in told
    brought = log("pool", NAMESPACE)
    assert "a block of 1048576 bytes was stored and came back from tier" in brought
    print(told, brought, sep="\n")


def test_it_fails_where_the_pool_is_not_there(load_pool: str):
    with pytest.raises(CommandError, match="failed"):
        helm_test(f"{load_pool}-that-is-not-there")
    assert f"dry run: a pod in {NAMESPACE} would not be injected" in log("webhook", system.SYSTEM)
