"""Certificates: lives, overlap, the shared Secret, and real TLS handshakes while everything rotates."""

import asyncio
import base64
import ssl
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from aiohttp import ClientConnectorCertificateError, ClientSession, TCPConnector, web
from cryptography import x509

from kvpool_operator.errors import ConflictError
from kvpool_operator.pki.certificates import (
    CertPolicy,
    TrustBundle,
    issue_leaf,
    leaf_due,
    new_authority,
    next_authorities,
)
from kvpool_operator.webhook.self_signed import CertificateManager, DnsNames, server_context

DNS = ("kvpool-webhook.kvpool-system.svc",)
NAMES = DnsNames("kvpool-webhook-ca", DNS)
POLICY = CertPolicy(
    ca_life=timedelta(hours=12), leaf_life=timedelta(hours=3), settle=timedelta(minutes=10), skew=timedelta(minutes=5)
)


class Clock:
    """Starts at the real time, because OpenSSL compares with that."""

    def __init__(self):
        self.now = datetime.now(UTC).replace(microsecond=0)

    def __call__(self):
        return self.now

    def pass_(self, **time):
        self.now += timedelta(**time)


class Store:
    """The two objects in memory, with resource versions; `before_write` stands for another replica."""

    def __init__(self):
        self.secret = None
        self.configuration = a_configuration()
        self.version = 0
        self.patches = 0
        self.writes = 0
        self.before_write = None

    async def read_secret(self):
        return self.secret

    async def write_secret(self, data, resource_version):
        if self.before_write:
            hook, self.before_write = self.before_write, None
            await hook()
        current = self.secret["metadata"]["resourceVersion"] if self.secret else None
        if current != resource_version:
            raise ConflictError
        self.version += 1
        self.writes += 1
        data = {k: v for k, v in data.items() if v is not None}
        self.secret = {"metadata": {"resourceVersion": str(self.version)}, "data": data}

    async def read_configuration(self):
        return self.configuration

    async def write_webhooks(self, webhooks, resource_version):
        assert resource_version == self.configuration["metadata"]["resourceVersion"]
        self.patches += 1
        self.version += 1
        self.configuration = {"metadata": {"resourceVersion": str(self.version)}, "webhooks": webhooks}

    @property
    def trusted(self):
        bundles = {w["clientConfig"]["caBundle"] for w in self.configuration["webhooks"]}
        (bundle,) = bundles
        return base64.b64decode(bundle)


def a_configuration():
    """Two webhooks, so that one that is forgotten shows; what is not ours must stay."""
    hooks = [{"name": n, "sideEffects": "None", "clientConfig": {"service": {"name": "s"}}} for n in ("a", "b")]
    return {"metadata": {"resourceVersion": "c"}, "webhooks": hooks}


async def until(holds):
    for _ in range(5000):
        if holds():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it never came true")


def a_keeper(store, clock, policy=POLICY):
    return CertificateManager(store, server_context(), NAMES, policy=policy, clock=clock)


def authority(now):
    return new_authority("ca", DNS, now, POLICY)


def test_an_authority_may_vouch_for_its_service_only():
    ca = authority(Clock()()).certificate
    assert ca.extensions.get_extension_for_class(x509.BasicConstraints).value.path_length == 0
    constraints = ca.extensions.get_extension_for_class(x509.NameConstraints)
    assert constraints.critical
    assert [n.value for n in constraints.value.permitted_subtrees] == list(DNS)


def test_a_leaf_names_the_service_and_never_outlives_its_signer():
    clock = Clock()
    ca = authority(clock())
    leaf = issue_leaf(ca, DNS, clock.now, POLICY)
    assert leaf.expires == clock.now + POLICY.leaf_life
    late = issue_leaf(ca, DNS, ca.expires - timedelta(hours=1), POLICY)
    assert late.expires == ca.expires


def test_a_leaf_is_renewed_at_two_thirds_or_when_the_signer_changes():
    now = Clock()()
    ca, other = authority(now), authority(now)
    leaf = issue_leaf(ca, DNS, now, POLICY)
    assert leaf_due(None, ca, now, POLICY)
    assert not leaf_due(leaf, ca, now + timedelta(minutes=119), POLICY)
    assert leaf_due(leaf, ca, now + timedelta(minutes=120), POLICY)
    assert leaf_due(leaf, other, now, POLICY)


def test_two_authorities_overlap_on_rotation():
    start = Clock()()
    first = next_authorities(None, "ca", DNS, start, POLICY)
    assert first.previous is None
    assert next_authorities(first, "ca", DNS, start + timedelta(hours=7, minutes=59), POLICY) is first

    turn = start + timedelta(hours=8)
    second = next_authorities(first, "ca", DNS, turn, POLICY)
    assert second.previous is first.current
    assert second.bundle(turn) == second.current.certificate_pem + first.current.certificate_pem
    # trusted first, signing later
    assert second.signer(turn, POLICY) is first.current
    assert second.signer(turn + POLICY.settle, POLICY) is second.current

    assert next_authorities(second, "ca", DNS, start + timedelta(hours=11), POLICY) is second
    third = next_authorities(second, "ca", DNS, start + POLICY.ca_life, POLICY)
    assert third == TrustBundle(second.current)


def test_an_authority_about_to_end_signs_no_more():
    start = Clock()()
    first = authority(start)
    late = first.expires - timedelta(minutes=1)
    both = TrustBundle(authority(late), first)
    assert both.signer(late, POLICY) is both.current


def test_an_expired_authority_is_not_carried_along():
    start = Clock()()
    first = next_authorities(None, "ca", DNS, start, POLICY)
    after = next_authorities(first, "ca", DNS, start + timedelta(days=30), POLICY)
    assert after.previous is None
    assert after.current is not first.current


def test_the_secret_round_trips():
    start = Clock()()
    both = TrustBundle(authority(start), authority(start))
    read = TrustBundle.from_secret(both.to_secret())
    assert read is not None
    assert read.to_secret() == both.to_secret()


@pytest.mark.parametrize(
    "damage",
    [
        lambda d: {},
        lambda d: d | {"ca.crt": b"x"},
        lambda d: d | {"ca.key": b""},
        lambda d: d | {"ca.key": d["previous.key"]},
        lambda d: d | {"ca.crt": d["ca.crt"][:200]},
    ],
)
def test_a_damaged_secret_is_no_authority(damage):
    start = Clock()()
    data = TrustBundle(authority(start), authority(start)).to_secret()
    assert TrustBundle.from_secret(damage(data)) is None


async def test_ready_means_served_and_trusted():
    clock, store = Clock(), Store()
    keeper = a_keeper(store, clock)
    assert not keeper.ready
    await keeper.step()
    assert keeper.ready
    clock.pass_(hours=4)  # past the leaf's end, and no one polled
    assert not keeper.ready


async def test_nothing_is_served_before_it_is_trusted():
    clock, store = Clock(), Store()
    store.configuration = None
    keeper = a_keeper(store, clock)
    with pytest.raises(LookupError, match="MutatingWebhookConfiguration"):
        await keeper.step()
    assert not keeper.ready
    assert keeper.expires is None


async def test_replicas_share_the_authority_and_not_the_leaf():
    clock, store = Clock(), Store()
    one, two = a_keeper(store, clock), a_keeper(store, clock)
    await asyncio.gather(one.step(), two.step())
    assert store.writes == 1
    assert one.ready
    assert two.ready
    assert one._leaf.issuer.certificate == two._leaf.issuer.certificate
    assert one._leaf.key_pem != two._leaf.key_pem
    assert b"PRIVATE KEY" not in store.trusted


async def test_the_replica_that_loses_the_race_takes_the_others_authority():
    clock, store = Clock(), Store()
    one, two = a_keeper(store, clock), a_keeper(store, clock)
    store.before_write = two.step
    await one.step()
    assert store.writes == 1
    assert one._leaf.issuer.certificate == two._leaf.issuer.certificate


async def test_a_secret_that_never_stops_changing_is_an_error():
    clock, store = Clock(), Store()

    class Busy(Store):
        async def write_secret(self, data, resource_version):
            raise ConflictError

    with pytest.raises(ConflictError, match="in a row"):
        await a_keeper(Busy(), clock).step()
    assert store.secret is None


async def test_a_ca_bundle_that_somebody_removed_is_written_again():
    clock, store = Clock(), Store()
    keeper = a_keeper(store, clock)
    await keeper.step()
    await keeper.step()
    assert store.patches == 1
    store.configuration = a_configuration()
    await keeper.step()
    assert store.patches == 2
    assert store.trusted
    assert [w["name"] for w in store.configuration["webhooks"]] == ["a", "b"]
    assert all(w["clientConfig"]["service"] == {"name": "s"} for w in store.configuration["webhooks"])


async def test_a_deleted_or_damaged_secret_is_made_again():
    clock, store = Clock(), Store()
    keeper = a_keeper(store, clock)
    await keeper.step()
    for secret in (None, {"metadata": {"resourceVersion": "1"}, "data": {"ca.crt": "&", "ca.key": "eA=="}}):
        store.secret = secret
        await keeper.step()
        assert keeper._leaf.issuer.certificate_pem == store.trusted


async def test_an_authority_that_ended_leaves_the_secret():
    clock, store = Clock(), Store()
    keeper = a_keeper(store, clock)
    await keeper.step()
    clock.pass_(hours=8)
    await keeper.step()
    assert set(store.secret["data"]) == {"ca.crt", "ca.key", "previous.crt", "previous.key"}
    clock.pass_(hours=4)
    await keeper.step()
    assert set(store.secret["data"]) == {"ca.crt", "ca.key"}
    assert store.trusted.count(b"BEGIN CERTIFICATE") == 1


async def test_the_loop_outlives_failures(caplog):
    clock, store = Clock(), Store()
    store.configuration = None
    keeper = CertificateManager(store, server_context(), NAMES, policy=POLICY, clock=clock, poll_s=0.001)
    task = asyncio.create_task(keeper.run())
    await until(lambda: "cannot check the certificates" in caplog.text)
    store.configuration = a_configuration()
    await until(lambda: keeper.ready)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


class Https:
    """A real listener on the keeper's context."""

    def __init__(self, context):
        self.context = context

    async def __aenter__(self):
        app = web.Application()
        app.router.add_get("/", self.hello)
        self.runner = web.AppRunner(app, access_log=None)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0, ssl_context=self.context)
        await site.start()
        self.port = self.runner.addresses[0][1]
        return self

    async def __aexit__(self, *_):
        await self.runner.cleanup()

    async def hello(self, _):
        return web.Response(text="hello")

    async def get(self, trusted_pem):
        """A fresh connection as the API server makes it: the bundle of the configuration, the Service's name."""
        context = ssl.create_default_context(cadata=trusted_pem.decode())
        async with (
            ClientSession(connector=TCPConnector(ssl=context, force_close=True)) as session,
            session.get(f"https://127.0.0.1:{self.port}/", server_hostname=DNS[0]) as response,
        ):
            return await response.text()


async def test_handshakes_hold_through_a_whole_rotation():
    """Two replicas; one client uses the bundle as published, another the one of five minutes ago.

    The clock of the keepers runs ahead; with a skew above its whole way, every certificate is valid by OpenSSL's too.
    """
    clock, store = Clock(), Store()
    policy = replace(POLICY, skew=timedelta(hours=24))
    one, two = a_keeper(store, clock, policy), a_keeper(store, clock, policy)
    for keeper in (one, two):
        await keeper.step()
    bundles, leaves = [store.trusted], set()
    async with Https(one._context) as a, Https(two._context) as b:
        for _ in range(108):  # nine hours: one rotation of the authority, several of the leaves
            clock.pass_(minutes=5)
            stale = store.trusted
            for keeper in (one, two):
                await keeper.step()
            leaves |= {one._leaf.certificate_pem, two._leaf.certificate_pem}
            if store.trusted != bundles[-1]:
                bundles.append(store.trusted)
            for listener in (a, b):
                for bundle in {stale, store.trusted}:
                    assert await listener.get(bundle) == "hello"
    assert len(bundles) == 2
    assert bundles[1].count(b"BEGIN CERTIFICATE") == 2
    assert bundles[1].endswith(bundles[0])
    assert store.writes == 2
    assert len(leaves) == 2 * 6  # five renewals of each: four times two hours, and the change of the signer
    assert one._leaf.issuer.certificate_pem == two._leaf.issuer.certificate_pem == bundles[1][: -len(bundles[0])]


async def test_a_client_that_does_not_trust_the_authority_is_refused():
    clock, store = Clock(), Store()
    keeper = a_keeper(store, clock)
    await keeper.step()
    async with Https(keeper._context) as listener:
        stranger = authority(clock.now).certificate_pem
        with pytest.raises(ClientConnectorCertificateError):
            await listener.get(stranger)
