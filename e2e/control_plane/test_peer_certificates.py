"""Certificates of sidecars, with a real API server, a real operator and real sidecars: who gets one, and for what."""

from __future__ import annotations

import base64
import contextlib
import json
import socket
import ssl
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest
from api import APPLY, until
from conftest import SYSTEM
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from kubelet import address
from sidecars import RealSidecars, sidecar_token

from kvpool.protocol.certificate_names import node_name, operator_name

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Operator, Pools
    from kubelet import Kubelet

pytestmark = pytest.mark.cluster

ADMIN_PORT = 7423


def secret(pools: Pools, pool: str = "chat") -> dict[str, str]:
    data = pools.owned(pool)[f"secrets/{pool}-secret"]["data"]
    return {k: base64.b64decode(v).decode() for k, v in data.items()}


class Leaf:
    """A certificate signing request for these names, and its answer."""

    def __init__(self, *names: str) -> None:
        self.key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "x")])
        alternative = x509.SubjectAlternativeName([x509.DNSName(n) for n in names])
        builder = x509.CertificateSigningRequestBuilder().subject_name(subject).add_extension(alternative, False)
        self.csr = builder.sign(self.key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM).decode()
        self.certificate = ""

    def request(self, pools: Pools, token: str) -> str:
        """Empty if a certificate was issued; else the sentence of the refusal."""
        context = ssl.create_default_context(cadata=secret(pools)["issuer-ca.crt"])
        context.check_hostname = False
        request = urllib.request.Request(
            f"{pools.issuer_url}/v1/leaf",
            json.dumps({"csr": self.csr}).encode(),
            {"Authorization": f"Bearer {token}"},
        )
        try:
            with urllib.request.urlopen(request, timeout=20, context=context) as answer:
                self.certificate = json.load(answer)["certificate"]
        except urllib.error.HTTPError as e:
            return str(json.load(e)["error"])
        return ""

    def save(self, path: Path) -> Path:
        kind = serialization.PrivateFormat.PKCS8
        private = self.key.private_bytes(serialization.Encoding.PEM, kind, serialization.NoEncryption())
        path.write_bytes(self.certificate.encode() + private)
        return path


@pytest.fixture
def sidecars(kubelet: Kubelet) -> dict[str, Any]:
    """No doubles: the real ones of this module have their addresses."""
    return {}


def made(pools: Pools, name: str) -> None:
    """A pool with what its sidecars read."""
    pools.apply(name)
    needed = {f"secrets/{name}-secret", f"configmaps/{name}-config"}
    until("Secret and configuration are there", lambda: pools.owned(name).keys() >= needed)


@pytest.fixture
def pool(pools: Pools) -> Pools:
    made(pools, "chat")
    return pools


def test_the_pools_secret_holds_no_key_of_its_ca(pool: Pools):
    assert "PRIVATE KEY" not in json.dumps(secret(pool))
    assert "BEGIN CERTIFICATE" in secret(pool)["peer-ca.crt"]


def test_a_token_of_the_sidecars_pod_buys_a_leaf_for_its_node_and_no_other(pool: Pools):
    pool_id = secret(pool)["pool-id"]
    token = sidecar_token(pool, "chat", "node-a")
    own = Leaf(node_name(pool_id, "node-a"))
    assert own.request(pool, token) == ""
    ca = x509.load_pem_x509_certificate(secret(pool)["peer-ca.crt"].encode())
    x509.load_pem_x509_certificate(own.certificate.encode()).verify_directly_issued_by(ca)
    for name in (node_name(pool_id, "node-b"), operator_name(pool_id), node_name("another", "node-a")):
        assert "another name" in Leaf(name).request(pool, token)


def test_forged_foreign_and_unbound_tokens_are_refused(pool: Pools):
    leaf = Leaf(node_name(secret(pool)["pool-id"], "node-a"))
    good = sidecar_token(pool, "chat", "node-a")
    head, claims, signature = good.split(".")
    for token in ("x", f"{head}.{claims}.{signature[::-1]}", f"{head}.{claims}."):
        assert "not valid for this audience" in leaf.request(pool, token)
    default = sidecar_token(pool, "chat", "node-a", audience="https://kubernetes.default.svc")
    assert "not valid for this audience" in leaf.request(pool, default)
    unbound = sidecar_token(pool, "chat", "node-a", boundObjectRef=None)
    assert "not bound to a pod" in leaf.request(pool, unbound)
    request = {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenRequest",
        "spec": {"audiences": ["kvpool.dev/issuer"]},
    }
    account = f"/api/v1/namespaces/{SYSTEM}/serviceaccounts/kvpool-operator/token"
    other = pool.api.call("POST", account, request)["status"]["token"]
    assert "service account" in leaf.request(pool, other)
    assert leaf.request(pool, good) == ""


def test_a_token_of_another_pool_buys_nothing_in_this_one(pool: Pools):
    made(pool, "other")
    leaf = Leaf(node_name(secret(pool)["pool-id"], "node-a"))
    assert "another name" in leaf.request(pool, sidecar_token(pool, "other", "node-a"))


def test_a_copied_secret_does_not_make_another_pools_ca_sign(pool: Pools):
    """An author of pools and Secrets in a namespace gives its pool the ID and the certificate of another."""
    victim = secret(pool)
    data = {k: base64.b64encode(victim[k].encode()).decode() for k in ("pool-id", "peer-ca.crt")}
    labels = pool.owned("chat")["secrets/chat-secret"]["metadata"]["labels"] | {"kvpool.dev/pool": "thief"}
    manifest = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "thief-secret", "namespace": SYSTEM, "labels": labels},
        "data": data,
    }
    pool.api.call("PATCH", f"/api/v1/namespaces/{SYSTEM}/secrets/thief-secret?fieldManager=thief", manifest, APPLY)
    made(pool, "thief")
    leaf = Leaf(node_name(victim["pool-id"], "node-a"))
    said = leaf.request(pool, sidecar_token(pool, "thief", "node-a"))
    ca = x509.load_pem_x509_certificate(victim["peer-ca.crt"].encode())
    if said == "":  # signed by a CA of the thief's own, which the victim's nodes do not know
        with pytest.raises(Exception, match=r"|"):
            x509.load_pem_x509_certificate(leaf.certificate.encode()).verify_directly_issued_by(ca)


def test_real_sidecars_obtain_leaves_and_load_each_others_blocks(pool: Pools, tmp_path: Path):
    with RealSidecars(pool, "chat", tmp_path) as real:
        for node in ("node-a", "node-b"):
            real.start(node)
        real.store("node-a", range(4))
        until("node-b loads the blocks of node-a", lambda: real.loads("node-b", range(4)) == 4, timeout=60)


def test_a_nodes_leaf_does_not_open_the_admin_port(pool: Pools, tmp_path: Path):
    pool_id, ca = secret(pool)["pool-id"], secret(pool)["peer-ca.crt"]
    with RealSidecars(pool, "chat", tmp_path) as real:
        real.start("node-a")
        until("node-a has a leaf", lambda: real.status("node-a")["peers"]["certificate_seconds_left"] > 0, timeout=60)
        leaf = Leaf(node_name(pool_id, "node-b"))
        assert leaf.request(pool, sidecar_token(pool, "chat", "node-b")) == ""
        context = ssl.create_default_context(cadata=ca)
        context.load_cert_chain(leaf.save(tmp_path / "leaf.pem"))
        with socket.create_connection((address("node-a"), ADMIN_PORT), timeout=10) as raw:
            answer = b""
            tls = context.wrap_socket(raw, server_hostname=node_name(pool_id, "node-a"))  # it is of the pool's CA
            with tls, contextlib.suppress(ConnectionError, ssl.SSLError):
                tls.sendall(b"GET /v1/operations/x HTTP/1.0\r\n\r\n")
                answer = tls.recv(64)
            assert answer == b""
        until("the refusal is counted", lambda: "admin-certificate" in json.dumps(real.status("node-a")))


def test_without_the_operator_a_sidecar_starts_and_serves_its_own_blocks(
    pool: Pools, operator: Operator, tmp_path: Path
):
    with RealSidecars(pool, "chat", tmp_path) as real:
        token = sidecar_token(pool, "chat", "node-a")
        operator.end()
        (tmp_path / "node-a").mkdir(exist_ok=True)
        assert token
        real.start("node-a")
        real.store("node-a", range(4))
        assert real.loads("node-a", range(4)) == 4
        operator.ensure()
        real.start("node-b")
        until("node-b loads the blocks of node-a", lambda: real.loads("node-b", range(4)) == 4, timeout=90)
