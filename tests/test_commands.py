"""Orders from the operator's own client to a sidecar's own port, by the authority that the operator makes."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from kvpool_operator.desired.inputs import PoolSecret
from kvpool_operator.errors import SidecarRejectedError, SidecarUnavailableError
from kvpool_operator.pki.authority_root import AuthorityRoot, PoolIdentity
from kvpool_operator.pki.certificates import CertPolicy
from kvpool_operator.pki.peer_ca import peer_files
from kvpool_operator.sidecars import admin_client as command
from kvpool_operator.sidecars.admin_client import HttpSidecarAdminClient, open_admin_client
from kvpool_operator.sidecars.operation import OperationProgress, SidecarAddress
from kvpool_sidecar.admin.operations import Operations
from kvpool_sidecar.admin.server import AdminServer
from kvpool_sidecar.counters import Stats
from kvpool_sidecar.peers import ca as authority
from kvpool_sidecar.peers.certificate import NodeIdentity

UID = "5d0c9a52-pool"


def secret(files: dict[str, str], uid: str = UID) -> PoolSecret:
    return PoolSecret(uid, "ab" * 32, "", files)


ROOT = AuthorityRoot.generate()


def authority_files(stored: dict[str, str], now: datetime) -> dict[str, str]:
    """The CA's files with the keys that the operator derives."""
    made = peer_files(stored, ROOT, PoolIdentity("kvpool-system", "chat", "pool"), now)
    return {**made.published, **made.keys}


class World:
    """A sidecar of one pool: its port for orders, and one kind that waits."""

    def __init__(self, files: dict[str, str]) -> None:
        self.files = files
        self.release = threading.Event()
        self.operations = Operations({"wait": self._wait, "fail": self._fail}, Stats())
        identity = NodeIdentity(lambda: authority.read(lambda n: self.files.get(n, "").encode(), b""), UID, "node-a")
        self.identity = identity
        self.server = AdminServer("127.0.0.1", 0, identity, self.operations, Stats())
        self.server.start()
        self.to = SidecarAddress("node-a", "127.0.0.1")

    def _wait(self, params, context):
        context.set_progress(1, 2, "blocks")
        while not self.release.wait(0.01):
            context.check()
        return {"blocks": 5}

    def _fail(self, params, context):
        raise OSError("no such file")

    def close(self) -> None:
        self.server.stop()
        self.operations.stop()


@pytest.fixture
def world():
    made = World(authority_files({}, datetime.now(UTC)))
    yield made
    made.close()


@pytest.fixture
async def commands(world):
    async with open_admin_client(world.server.port) as made:
        yield made


async def ended(commands: HttpSidecarAdminClient, pool: PoolSecret, to: SidecarAddress, name: str) -> OperationProgress:
    async with asyncio.timeout(30):
        while True:
            found = await commands.poll(pool, to, name)
            assert found is not None
            if found.state != "Running":
                return found
            await asyncio.sleep(0.02)


async def test_an_order_is_started_once_polled_and_done(world, commands):
    pool = secret(world.files)
    first = await commands.start(pool, world.to, "uid-0", "wait", {"n": 1})
    assert first.state == "Running"
    assert await commands.start(pool, world.to, "uid-0", "wait", {"n": 1}) is not None
    world.release.set()
    done = await ended(commands, pool, world.to, "uid-0")
    assert done == OperationProgress("Succeeded", "", 1, 2, "blocks", {"blocks": 5})
    assert await commands.poll(pool, world.to, "uid-1") is None


async def test_a_failure_and_a_cancellation_are_told(world, commands):
    pool = secret(world.files)
    await commands.start(pool, world.to, "uid-0", "fail", {})
    assert (await ended(commands, pool, world.to, "uid-0")).message == "no such file"
    await commands.start(pool, world.to, "uid-1", "wait", {})
    await commands.cancel(pool, world.to, "uid-1")
    assert (await ended(commands, pool, world.to, "uid-1")).message == "cancelled"
    await commands.cancel(pool, world.to, "never-heard-of")


async def test_what_is_refused_and_what_may_work_later_are_told_apart(world, commands):
    pool = secret(world.files)
    with pytest.raises(SidecarRejectedError, match="supports fail, wait"):
        await commands.start(pool, world.to, "uid-0", "other", {})
    await commands.start(pool, world.to, "uid-1", "wait", {})
    await commands.start(pool, world.to, "uid-2", "wait", {})
    with pytest.raises(SidecarUnavailableError, match="2 operations"):
        await commands.start(pool, world.to, "uid-3", "wait", {})
    with pytest.raises(SidecarUnavailableError):
        await commands.start(
            pool, SidecarAddress("node-b", "127.0.0.1"), "uid-4", "wait", {}
        )  # the certificate says node-a
    with pytest.raises(SidecarUnavailableError):
        await commands.start(secret(world.files, "another-pool"), world.to, "uid-5", "wait", {})
    with pytest.raises(SidecarUnavailableError, match="no CA yet"):
        await commands.start(secret({}), world.to, "uid-6", "wait", {})


async def test_orders_are_taken_before_during_and_after_the_authoritys_rotation(world):
    policy, now = CertPolicy(), datetime.now(UTC)
    old = authority_files({}, now - policy.ca_life * 0.7)
    both = authority_files(old, now)
    settled = authority_files(
        authority_files({}, now - policy.ca_life * 0.7 - timedelta(hours=1)), now - timedelta(hours=1)
    )
    async with open_admin_client(world.server.port) as commands:
        for n, (here, there) in enumerate([(old, old), (old, both), (both, old), (both, both), (settled, settled)]):
            world.files = there
            world.identity.refresh()
            assert await commands.poll(secret(here), world.to, f"none-{n}") is None


async def test_a_certificate_is_kept_while_it_is_good_and_made_anew_in_time(world, monkeypatch):
    made = []
    issue = command.issue_leaf
    monkeypatch.setattr(command, "issue_leaf", lambda *a, **kw: made.append(1) or issue(*a, **kw))
    now = [datetime.now(UTC)]
    async with open_admin_client(world.server.port) as commands:
        commands._now = lambda: now[0]
        pool = secret(world.files)
        for _ in range(3):
            await commands.poll(pool, world.to, "none")
        assert len(made) == 1
        now[0] += timedelta(days=5)
        commands._context(pool)
        assert len(made) == 2
        commands._context(replace(pool, peer_files=authority_files({}, now[0])))
        assert len(made) == 3


@pytest.mark.parametrize("raw", [None, [], {}, {"state": "Odd"}, {"state": ["Running"]}])
def test_an_answer_that_no_sidecar_gives_is_no_answer(raw):
    with pytest.raises(SidecarUnavailableError):
        OperationProgress.parse(raw)


def test_odd_numbers_count_as_nothing():
    raw = {
        "state": "Running",
        "progress": {"done": -1, "total": "7", "unit": 3},
        "counts": {"a": True, "b": 2**70, "c": 4},
    }
    assert OperationProgress.parse(raw) == OperationProgress("Running", "", 0, 0, "3", {"a": 0, "b": 0, "c": 4})
