"""The authority that the operator makes is one that sidecars can prove themselves by, also while it is rotated."""

from __future__ import annotations

import socket
import threading
from datetime import UTC, datetime, timedelta

from cryptography.hazmat.primitives import serialization

from kvpool.protocol.certificate_names import node_name
from kvpool_operator.pki.authority_root import AuthorityRoot, PoolIdentity
from kvpool_operator.pki.certificates import CertPolicy
from kvpool_operator.pki.peer_ca import peer_files
from kvpool_sidecar.peers import ca as authority
from kvpool_sidecar.peers.certificate import NodeIdentity

ROOT = AuthorityRoot.generate()


def authority_files(stored: dict[str, str], now: datetime) -> dict[str, str]:
    """The CA's files with the keys that the operator derives."""
    made = peer_files(stored, ROOT, PoolIdentity("kvpool-system", "chat", "pool"), now)
    return {**made.published, **made.keys}


def identity(files: dict[str, str], node: str) -> NodeIdentity:
    return NodeIdentity(lambda: authority.read(lambda name: files.get(name, "").encode(), b""), "pool", node)


def pem_of(one: NodeIdentity) -> str:
    """The certificate of the CA that signed the leaf."""
    return one._leaf.issuer.public_bytes(serialization.Encoding.PEM).decode()


def shake_hands(asking: NodeIdentity, serving: NodeIdentity) -> str:
    """The common name that the serving side sees."""
    ours, theirs = socket.socketpair()
    ours.settimeout(10)
    theirs.settimeout(10)
    seen = []

    def serve() -> None:
        with serving.server.wrap_socket(theirs, server_side=True) as tls:
            seen.append(dict(pair[0] for pair in tls.getpeercert()["subject"])["commonName"])
            tls.sendall(b"x")

    thread = threading.Thread(target=serve)
    thread.start()
    with asking.client.wrap_socket(ours, server_hostname=asking.name_of("b")) as tls:
        assert tls.recv(1) == b"x"
    thread.join()
    return seen[0]


def test_sidecars_prove_themselves_by_the_operators_authority_before_during_and_after_a_rotation():
    policy = CertPolicy()
    now = datetime.now(UTC)
    old = authority_files({}, now - policy.ca_life * 0.7)
    both = authority_files(old, now)
    assert both["peer-previous.crt"] == old["peer-ca.crt"]
    settled = authority_files(
        authority_files({}, now - policy.ca_life * 0.7 - timedelta(hours=1)), now - timedelta(hours=1)
    )
    for asking, serving in ((old, old), (old, both), (both, old), (both, both), (settled, settled)):
        assert shake_hands(identity(asking, "a"), identity(serving, "b")) == node_name("pool", "a")[:64]
    signers = [pem_of(identity(files, "a")) == files["peer-ca.crt"] for files in (old, both, settled)]
    assert signers == [True, False, True]  # a new authority is trusted before it signs
