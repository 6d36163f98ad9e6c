"""The CA and the server certificate of a managed index: when they change, and who trusts what meanwhile."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from cryptography import x509

from kvpool_operator.pki.index_tls import INDEX_CA, INDEX_FILES, INDEX_SERVER_CERT, INDEX_SERVER_KEY, index_files

NOW = datetime(2027, 1, 1, tzinfo=UTC)
NAMES = ("chat-index.kvpool-system.svc",)


def server(files: dict[str, str]) -> x509.Certificate:
    return x509.load_pem_x509_certificate(files[INDEX_SERVER_CERT].encode())


def is_trusted(files: dict[str, str], certificate: x509.Certificate) -> bool:
    for authority in x509.load_pem_x509_certificates(files[INDEX_CA].encode()):
        if authority.subject == certificate.issuer:
            try:
                certificate.verify_directly_issued_by(authority)
            except Exception:
                continue
            return True
    return False


def test_files_stay_the_same_until_something_is_due():
    first = index_files({}, NAMES, NOW)
    assert first.keys() <= set(INDEX_FILES)
    assert index_files(first, NAMES, NOW + timedelta(days=1)) == first
    assert is_trusted(first, server(first))
    names = server(first).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == list(NAMES)


def test_the_certificate_is_renewed_after_two_thirds_and_by_the_same_ca():
    first = index_files({}, NAMES, NOW)
    later = index_files(first, NAMES, NOW + timedelta(days=61))
    assert server(later) != server(first)
    assert later[INDEX_CA] == first[INDEX_CA]
    assert server(first).not_valid_after_utc > NOW + timedelta(days=89)


def test_a_new_ca_is_trusted_before_it_signs_and_the_old_one_while_it_is_in_use():
    first = index_files({}, NAMES, NOW)
    due = NOW + timedelta(days=245)  # two thirds of a year
    during = index_files(index_files(first, NAMES, due - timedelta(days=3)), NAMES, due)
    assert during[INDEX_CA] != first[INDEX_CA]
    assert first[INDEX_CA] in during[INDEX_CA]
    assert is_trusted(first, server(during)), "sidecars that have not read the new CA yet"
    after = index_files(during, NAMES, due + timedelta(minutes=11))
    assert is_trusted(during, server(after))
    assert not is_trusted(first, server(after))


def test_broken_or_foreign_files_are_replaced():
    first = index_files({}, NAMES, NOW)
    broken = first | {INDEX_SERVER_CERT: "nothing"}
    assert is_trusted(first, server(index_files(broken, NAMES, NOW)))
    assert index_files(first | {INDEX_SERVER_KEY: ""}, NAMES, NOW)[INDEX_SERVER_KEY]


def test_the_ca_may_sign_for_the_service_of_the_index_only():
    authority = x509.load_pem_x509_certificate(index_files({}, NAMES, NOW)[INDEX_CA].encode())
    constraints = authority.extensions.get_extension_for_class(x509.NameConstraints)
    assert constraints.critical
    assert constraints.value.permitted_subtrees == [x509.DNSName(NAMES[0])]
