"""The webhook away, mistrusted, slow, or changing its certificates: pods start in time, and what was missed shows."""

from __future__ import annotations

import base64
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest
from api import MERGE, Api, until
from conftest import SYSTEM, Pools, as_account, rendered
from cryptography import x509
from webhooks import HOOKS, Replica, Team, Webhooks, serve

from kvpool_operator.pki.certificates import CertPolicy, new_authority

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.cluster

FOR_EVER = "1000"


@pytest.fixture(scope="module")
def account(api: Api, rights: Path, kubeconfig: Path) -> Path:
    return as_account(api, kubeconfig, "kvpool-webhook")


@pytest.fixture(scope="module")
def team(api: Api) -> Team:
    return Team(api, "team-webhook", f"{SYSTEM}/chat")


@pytest.fixture
def webhooks(api: Api, account: Path, tmp_path: Path) -> Iterator[Webhooks]:
    """What they do about certificates they do when they start, and then not again for long."""
    yield from serve(api, rendered(), account, tmp_path, SYSTEM, certificate_poll=FOR_EVER)


def missed(pools: Pools, team: Team, name: str) -> None:
    """The pool says that this pod runs without it, and so does an Event on the pod."""
    until(f"{name} is counted", lambda: pools.get("chat")["status"]["pods"]["notInjected"] == 1)
    pools.until_condition("chat", "InjectionReady", "PodsNotInjected", f"{team.name}/{name}")
    events = f"/api/v1/namespaces/{team.name}/events?fieldSelector=involvedObject.name%3D{name},reason%3DNotInjected"
    (event,) = until("it is told of", lambda: pools.api.items(events))
    assert event["involvedObject"]["uid"] == pools.api.get(f"{team.pods}/{name}")["metadata"]["uid"]
    pools.api.delete(f"{team.pods}/{name}", gracePeriodSeconds=0)


@pytest.mark.parametrize("mode", ["shut", "slow"])
def test_while_the_webhook_is_away_or_slow_a_pod_is_made_within_its_timeout_and_shows(
    pools: Pools, webhooks: Webhooks, team: Team, mode: str
):
    pools.apply("chat")
    pools.until_ready("chat")
    team.until_injecting()
    webhooks.gate.set(mode)
    taken = webhooks.gate.taken
    injected, seconds = team.admitted(f"made-while-{mode}")
    assert not injected
    if mode == "slow":
        assert webhooks.gate.taken > taken
        assert 3 <= seconds < 30, "timeoutSeconds of the chart (3), not how long the webhook is slow (60)"
    webhooks.gate.set("open")
    missed(pools, team, f"made-while-{mode}")
    team.until_injecting()
    assert team.admitted("made-after")[0]
    until("it is counted", lambda: pools.get("chat")["status"]["pods"]["injected"] == 1)
    pools.until_condition("chat", "InjectionReady", "Injecting")
    pools.api.delete(f"{team.pods}/made-after", gracePeriodSeconds=0)


def test_with_a_wrong_authority_a_pod_is_made_and_shows_and_a_replica_puts_it_right(
    pools: Pools, webhooks: Webhooks, team: Team, account: Path, tmp_path: Path
):
    pools.apply("chat")
    pools.until_ready("chat")
    team.until_injecting()
    stranger = new_authority("stranger", (f"kvpool-webhook.{SYSTEM}.svc",), datetime.now(UTC), CertPolicy())
    hooks = pools.api.get(f"{HOOKS}/{webhooks.name}")["webhooks"]
    for hook in hooks:
        hook["clientConfig"]["caBundle"] = base64.b64encode(stranger.certificate_pem).decode()
    pools.api.call("PATCH", f"{HOOKS}/{webhooks.name}", {"webhooks": hooks}, MERGE)
    until("the webhook is not believed", lambda: not team.admitted("probe", dry=True)[0])
    assert not team.admitted("mistrusting")[0]
    missed(pools, team, "mistrusting")
    with Replica(account, tmp_path / "third", SYSTEM) as third:
        until("the third one is ready", third.ready)
        team.until_injecting()


def test_no_pod_is_missed_while_the_authority_and_all_certificates_change(
    pools: Pools, api: Api, team: Team, account: Path, tmp_path: Path
):
    """An authority of 30 s: a new one at 20, which signs from 26 on; a certificate lives 12. No failure is forgiven."""
    pools.apply("chat")
    pools.until_ready("chat")
    chart = rendered('webhook.failurePolicy="Fail"')
    lives = {"ca_life": "30", "certificate_life": "12", "ca_settle": "6", "certificate_poll": "0.3"}
    for webhooks in serve(api, chart, account, tmp_path, SYSTEM, **lives):
        team.until_injecting()
        bundles = [webhooks.bundle()]
        end = time.monotonic() + 90
        after = 0
        while after < 20:  # on, until the new authority alone has signed for a while
            assert team.admitted("probe", dry=True)[0]
            if (now := webhooks.bundle()) != bundles[-1]:
                bundles.append(now)
            after += len(bundles) > 2
            assert time.monotonic() < end, f"{len(bundles)} bundles"
            time.sleep(0.2)
    first, both, *_ = (x509.load_pem_x509_certificates(base64.b64decode(b)) for b in bundles)
    assert len(first) == 1
    assert both == [both[0], *first]
