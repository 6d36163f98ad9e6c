"""The authority of a pool's sidecars: made once, rotated with overlap, without a key in the pool's Secret."""

from __future__ import annotations

import base64
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from op_samples import SECRET, inputs

from kvpool_operator.desired import build
from kvpool_operator.desired.daemonset import obtains_certificates
from kvpool_operator.desired.secrets import PEER_CERTIFICATES, PEER_FILES, read_secret, secret
from kvpool_operator.pki.authority_root import AuthorityRoot, PoolIdentity
from kvpool_operator.pki.certificates import CertPolicy, TrustBundle, new_authority
from kvpool_operator.pki.peer_ca import PEER_POLICY, PeerFiles, derived_keys, peer_authorities, peer_files
from kvpool_operator.pools.secrets import generate_secret

NOW = datetime(2027, 3, 1, tzinfo=UTC)
YEAR = CertPolicy().ca_life
ROOT = AuthorityRoot(bytes(32))
POOL = PoolIdentity("kvpool-system", "chat", "id")


def files(stored: dict[str, str], now: datetime, *, is_rolled: bool = True, root: AuthorityRoot = ROOT) -> PeerFiles:
    return peer_files(stored, root, POOL, now, is_rolled=is_rolled)


def bundle(made: PeerFiles) -> TrustBundle:
    found = peer_authorities({**made.published, **made.keys})
    assert found is not None
    return found


def with_key_in_secret(now: datetime) -> dict[str, str]:
    """What an earlier build stored."""
    data = TrustBundle(new_authority("kvpool peers", ("kvpool",), now, CertPolicy())).to_secret()
    return {"peer-ca.crt": data["ca.crt"].decode(), "peer-ca.key": data["ca.key"].decode()}


def test_an_authority_is_made_once_and_its_key_is_stored_nowhere():
    made = files({}, NOW)
    assert set(made.published) == {"peer-ca.crt", "issuer-ca.crt"}
    assert set(made.keys) == {"peer-ca.key"}
    assert "PRIVATE" not in "".join(made.published.values())
    assert x509.load_pem_x509_certificate(made.published["peer-ca.crt"].encode()).not_valid_after_utc == NOW + YEAR
    assert files(dict(made.published), NOW + timedelta(days=200)) == made


@pytest.mark.parametrize(
    "other",
    [
        PoolIdentity("team-a", "chat", "id"),
        PoolIdentity("kvpool-system", "chat2", "id"),
        PoolIdentity("kvpool-system", "chat", "id2"),
    ],
)
def test_a_copied_certificate_yields_no_key_for_another_pool(other: PoolIdentity):
    made = files({}, NOW)
    assert derived_keys(made.published, ROOT, POOL)
    assert derived_keys(made.published, ROOT, other) == {}
    assert derived_keys(made.published, AuthorityRoot(bytes([1]) * 32), POOL) == {}


def test_it_is_rotated_at_two_thirds_of_its_life_and_the_old_one_stays_until_its_last_leaf_expires():
    first = files({}, NOW)
    later = NOW + YEAR * 0.67
    second = files(dict(first.published), later)
    assert second.published["peer-ca.crt"] != first.published["peer-ca.crt"]
    assert second.published["peer-previous.crt"] == first.published["peer-ca.crt"]
    assert set(second.keys) == {"peer-ca.key", "peer-previous.key"}
    assert bundle(second).signer(later, PEER_POLICY).certificate == bundle(first).current.certificate
    settled = later + timedelta(minutes=11)
    assert bundle(second).signer(settled, PEER_POLICY).certificate == bundle(second).current.certificate
    assert files(dict(second.published), later + timedelta(days=2)) == second
    third = files(dict(second.published), later + timedelta(days=4))
    assert set(third.published) == {"peer-ca.crt", "issuer-ca.crt"}


@pytest.mark.parametrize("damage", ["peer-ca.crt", "issuer-ca.crt"])
def test_a_damaged_authority_is_replaced(damage: str):
    made = files({}, NOW)
    again = files({**made.published, damage: "nonsense"}, NOW + timedelta(seconds=5))
    assert again.published[damage] != "nonsense"
    assert bundle(again).current.key_pem


def test_another_root_replaces_the_authority_and_still_trusts_the_old_one():
    made = files({}, NOW)
    again = files(dict(made.published), NOW + timedelta(days=1), root=AuthorityRoot.generate())
    assert again.published["peer-previous.crt"] == made.published["peer-ca.crt"]
    assert again.published["issuer-ca.crt"] != made.published["issuer-ca.crt"]
    assert bundle(again).previous is None


def test_a_key_of_an_earlier_build_signs_until_the_sidecars_are_replaced_and_then_leaves_the_secret():
    stored = with_key_in_secret(NOW)
    rolling = files(stored, NOW + timedelta(days=1), is_rolled=False)
    assert {k: rolling.published[k] for k in stored} == stored  # old and new sidecars verify each other
    rolled_at = NOW + timedelta(days=2)
    rolled = files(dict(rolling.published), rolled_at)
    assert rolled.published["peer-previous.key"] == stored["peer-ca.key"]
    assert "peer-ca.key" not in rolled.published
    assert bundle(rolled).signer(rolled_at, PEER_POLICY).certificate == bundle(rolling).current.certificate
    settled = files(dict(rolled.published), rolled_at + timedelta(minutes=25))
    assert "PRIVATE" not in "".join(settled.published.values())
    assert settled.published["peer-previous.crt"] == stored["peer-ca.crt"]
    over = files(dict(settled.published), rolled_at + timedelta(days=4))
    assert set(over.published) == {"peer-ca.crt", "issuer-ca.crt"}


def test_the_files_survive_the_way_through_the_secret():
    made = files({}, NOW)
    one = replace(SECRET, peer_files=made.published)
    manifest = secret(replace(inputs(), secret=one))
    assert read_secret(manifest, generate_secret()) == one
    manifest["data"]["peer-ca.crt"] = "not base 64!"
    assert read_secret(manifest, generate_secret()).peer_files.keys() == {"issuer-ca.crt"}


def test_derived_keys_are_in_no_object():
    made = files({}, NOW)
    one = replace(SECRET, peer_files=made.published, peer_keys=made.keys)
    found = [m for m in build(replace(inputs(), secret=one)) if m["kind"] == "Secret"]
    texts = [base64.b64decode(v).decode() for m in found for v in m["data"].values()]
    assert texts
    assert not [t for t in texts if "PRIVATE KEY" in t]


def test_a_new_authority_does_not_roll_the_sidecars():
    def template(published: dict[str, str]) -> object:
        one = replace(SECRET, peer_files=published)
        (found,) = (m for m in build(replace(inputs(), secret=one)) if m["kind"] == "DaemonSet")
        return found["spec"]["template"]

    before = dict(files({}, NOW).published)
    assert template(before) == template(dict(files(before, NOW + YEAR * 0.7).published))


def test_the_sidecars_get_the_certificates_and_no_key():
    (daemonset,) = (m for m in build(inputs()) if m["kind"] == "DaemonSet")
    volumes = {v["name"]: v for v in daemonset["spec"]["template"]["spec"]["volumes"]}
    keys = {item["key"] for item in volumes["secret"]["secret"]["items"]}
    assert keys >= set(PEER_CERTIFICATES)
    assert not keys & (set(PEER_FILES) - set(PEER_CERTIFICATES))
    (source,) = volumes["issuer-token"]["projected"]["sources"]
    assert source["serviceAccountToken"]["audience"] == "kvpool.dev/issuer"


def test_a_rollout_is_over_when_every_sidecar_asks_the_operator():
    (daemonset,) = (m for m in build(inputs()) if m["kind"] == "DaemonSet")
    status = {"observedGeneration": 2, "desiredNumberScheduled": 3, "updatedNumberScheduled": 3}
    live = {**daemonset, "metadata": {**daemonset["metadata"], "generation": 2}, "status": status}
    assert obtains_certificates(None)
    assert obtains_certificates(live)
    for change in ({"observedGeneration": 1}, {"updatedNumberScheduled": 2}, {"numberUnavailable": 1}):
        assert not obtains_certificates({**live, "status": status | change})
    old = {**live, "spec": {"template": {"spec": {"volumes": []}}}}
    assert not obtains_certificates(old)
