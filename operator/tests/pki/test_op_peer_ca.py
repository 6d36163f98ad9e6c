"""The authority of a pool's sidecars: made once, rotated with overlap, and never a reason to restart them."""

from __future__ import annotations

import base64
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from op_samples import SECRET, inputs

from kvpool_operator.desired import build
from kvpool_operator.desired.secrets import PEER_FILES, read_secret, secret
from kvpool_operator.pki.certificates import CertPolicy
from kvpool_operator.pki.peer_ca import peer_files
from kvpool_operator.pools.secrets import generate_secret

NOW = datetime(2027, 3, 1, tzinfo=UTC)
YEAR = CertPolicy().ca_life


def test_an_authority_is_made_once():
    made = peer_files({}, NOW)
    assert set(made) == {"peer-ca.crt", "peer-ca.key"}
    assert x509.load_pem_x509_certificate(made["peer-ca.crt"].encode()).not_valid_after_utc == NOW + YEAR
    assert peer_files(made, NOW + timedelta(days=200)) == made
    assert peer_files({}, NOW)["peer-ca.key"] != made["peer-ca.key"]


def test_it_is_rotated_at_two_thirds_of_its_life_and_the_old_one_stays_until_it_expires():
    first = peer_files({}, NOW)
    second = peer_files(first, NOW + YEAR * 0.67)
    assert second["peer-ca.crt"] != first["peer-ca.crt"]
    assert second["peer-previous.crt"] == first["peer-ca.crt"]
    assert second["peer-previous.key"] == first["peer-ca.key"]
    assert peer_files(second, NOW + YEAR * 0.9) == second
    third = peer_files(second, NOW + YEAR + timedelta(days=1))
    assert third["peer-ca.crt"] == second["peer-ca.crt"]
    assert set(third) == {"peer-ca.crt", "peer-ca.key"}


@pytest.mark.parametrize("damage", ["peer-ca.crt", "peer-ca.key"])
def test_a_damaged_authority_is_made_anew(damage):
    made = peer_files({}, NOW)
    again = peer_files({**made, damage: "nonsense"}, NOW)
    assert again["peer-ca.crt"] not in ("nonsense", made["peer-ca.crt"])


def test_the_files_survive_the_way_through_the_secret():
    made = peer_files({}, NOW)
    one = replace(SECRET, peer_files=made)
    manifest = secret(replace(inputs(), secret=one))
    assert read_secret(manifest, generate_secret()) == one
    manifest["data"]["peer-ca.crt"] = "not base 64!"
    assert read_secret(manifest, generate_secret()).peer_files.keys() == {"peer-ca.key"}


def test_a_new_authority_does_not_roll_the_sidecars():
    def template(files: dict[str, str]) -> object:
        one = replace(SECRET, peer_files=files)
        (found,) = (m for m in build(replace(inputs(), secret=one)) if m["kind"] == "DaemonSet")
        return found["spec"]["template"]

    before = peer_files({}, NOW)
    assert template(before) == template(peer_files(before, NOW + YEAR * 0.7))


def test_the_sidecars_get_all_its_files():
    (daemonset,) = (m for m in build(inputs()) if m["kind"] == "DaemonSet")
    (volume,) = (v for v in daemonset["spec"]["template"]["spec"]["volumes"] if v["name"] == "secret")
    assert {item["key"] for item in volume["secret"]["items"]} >= set(PEER_FILES)
    (found,) = (m for m in build(inputs()) if m["kind"] == "Secret")
    assert base64.b64decode(found["data"]["peer-ca.crt"]) == b"certificate"
