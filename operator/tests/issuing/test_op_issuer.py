"""Who gets a leaf certificate, and for which name. Reviews are replayed here; e2e/control_plane has real ones."""

from __future__ import annotations

import base64
import json
import ssl
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID
from op_samples import MemoryCluster

from kvpool.protocol.certificate_names import node_name, operator_name
from kvpool_operator.desired.labels import labels
from kvpool_operator.errors import ApiUnavailableError, LeafRefusedError
from kvpool_operator.issuing import server as serving
from kvpool_operator.issuing.issuer import LeafIssuer
from kvpool_operator.issuing.root_store import load_root
from kvpool_operator.issuing.server import IssuingServer, serve_issuer
from kvpool_operator.issuing.token_claims import AUDIENCE, read_claims
from kvpool_operator.k8s.client import Manifest, ObjectRef
from kvpool_operator.pki.authority_root import ISSUER_NAME, AuthorityRoot, PoolIdentity
from kvpool_operator.pki.peer_ca import PEER_POLICY, peer_files
from kvpool_operator.runtime.metrics import OperatorMetrics

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

NS, POOL, ID, NODE = "team", "chat", "5d0c9a52-pool", "node-a"
ROOT = AuthorityRoot.generate()
EXTRA = "authentication.kubernetes.io/"


def review(**changes: Any) -> dict[str, Any]:
    extra = {"pod-name": ["chat-sidecar-x"], "pod-uid": ["u1"], "node-name": [NODE]} | changes.pop("extra", {})
    user = {
        "username": f"system:serviceaccount:{NS}:{POOL}-sidecar",
        "extra": {EXTRA + k: v for k, v in extra.items() if v is not None},
    }
    user |= changes.pop("user", {})
    return {"status": {"authenticated": True, "audiences": [AUDIENCE], "user": user, **changes}}


class Cluster(MemoryCluster):
    """Answers TokenReviews with `answer`."""

    answer: dict[str, Any] = review()

    async def create(self, manifest: Manifest) -> Manifest:
        if manifest["kind"] != "TokenReview":
            return await super().create(manifest)
        assert manifest["spec"]["audiences"] == [AUDIENCE]
        return self.answer


def put_pod(cluster: Cluster, uid: str = "u1", node: str = NODE, **pod_labels: str) -> None:
    found = {"kvpool.dev/sockets": "agent"} | pod_labels
    metadata = {"name": "chat-sidecar-x", "namespace": NS, "uid": uid, "labels": found}
    cluster.put({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"nodeName": node}})


def put_secret(cluster: Cluster, root: AuthorityRoot = ROOT, name: str = POOL, **changes: str) -> dict[str, str]:
    files = dict(peer_files({}, root, PoolIdentity(NS, name, ID), datetime.now(UTC)).published) | changes
    data = {k: base64.b64encode(v.encode()).decode() for k, v in {"pool-id": ID, **files}.items()}
    metadata = {"name": f"{name}-secret", "namespace": NS, "labels": labels(name, "secret")}
    cluster.put({"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": data})
    return files


def csr(*names: str, key: Any = None) -> bytes:
    key = key or ec.generate_private_key(ec.SECP256R1())
    builder = x509.CertificateSigningRequestBuilder().subject_name(
        x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "x")])
    )
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(n) for n in names]), critical=False)
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


OWN = node_name(ID, NODE)


@pytest.fixture
def cluster() -> Cluster:
    made = Cluster()
    made.answer = review()
    put_pod(made)
    return made


async def test_a_sidecar_gets_a_leaf_for_its_node_of_its_pool_and_nothing_else(cluster: Cluster):
    files = put_secret(cluster)
    made = x509.load_pem_x509_certificate(await LeafIssuer(cluster, ROOT).issue("token", csr(OWN)))
    made.verify_directly_issued_by(x509.load_pem_x509_certificate(files["peer-ca.crt"].encode()))
    names = made.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == [OWN]
    assert not made.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    life = made.not_valid_after_utc - datetime.now(UTC)
    assert timedelta(days=2) < life <= PEER_POLICY.leaf_life


@pytest.mark.parametrize(
    "answer",
    [
        {"status": {"authenticated": False, "error": "expired"}},
        {},
        review(authenticated="true"),
        review(audiences=["https://kubernetes.default.svc"]),
        review(audiences=None),
        review(user={"username": "system:serviceaccount:team:default"}),
        review(user={"username": "system:serviceaccount:team:-sidecar"}),
        review(user={"username": "jane"}),
        review(user={"username": "system:node:node-a"}),
        review(extra={"pod-name": None}),
        review(extra={"pod-uid": None}),
        review(extra={"pod-uid": ["u1", "u2"]}),
        review(user={"extra": None}),
    ],
)
async def test_a_forged_foreign_or_unbound_token_is_refused(cluster: Cluster, answer: dict[str, Any]):
    put_secret(cluster)
    cluster.answer = answer
    with pytest.raises(LeafRefusedError, match="token"):
        await LeafIssuer(cluster, ROOT).issue("token", csr(OWN))


@pytest.mark.parametrize(
    "request_pem",
    [
        csr(node_name(ID, "node-b")),
        csr(operator_name(ID)),
        csr(node_name("another-pool", NODE)),
        csr(OWN, operator_name(ID)),
        csr(OWN, OWN),
        csr(),
        csr(OWN, key=rsa.generate_private_key(65537, 2048)),
        csr(OWN, key=ec.generate_private_key(ec.SECP384R1())),
        csr(OWN)[:-60] + b"AAAA\n-----END CERTIFICATE REQUEST-----\n",
        b"nonsense",
        b"x" * 5000,
    ],
)
async def test_a_request_for_anything_else_is_refused(cluster: Cluster, request_pem: bytes):
    put_secret(cluster)
    with pytest.raises(LeafRefusedError):
        await LeafIssuer(cluster, ROOT).issue("token", request_pem)


async def test_a_copied_certificate_in_another_pools_secret_yields_nothing(cluster: Cluster):
    victims = put_secret(cluster, name="victim")
    put_secret(cluster, **victims)  # the pool of the token has the same ID and the same CA's certificate
    with pytest.raises(LeafRefusedError, match="not made by this operator"):
        await LeafIssuer(cluster, ROOT).issue("token", csr(OWN))


async def test_a_pool_without_a_secret_of_ours_yields_nothing(cluster: Cluster):
    with pytest.raises(LeafRefusedError, match="does not exist"):
        await LeafIssuer(cluster, ROOT).issue("token", csr(OWN))


async def test_a_token_of_1_29_names_no_node_and_the_pod_says_where_it_runs(cluster: Cluster):
    put_secret(cluster)
    cluster.answer = review(extra={"node-name": None})
    assert await LeafIssuer(cluster, ROOT).issue("token", csr(OWN))


@pytest.mark.parametrize(
    ("pod", "sentence"),
    [
        ({"uid": "u2"}, "does not exist"),
        ({"node": "node-b"}, "another node"),
        ({"node": ""}, "another node"),
        ({"kvpool.dev/sockets": "no"}, "not a sidecar of the operator"),
    ],
)
async def test_the_pod_of_the_token_must_be_a_sidecar_on_that_node(
    cluster: Cluster, pod: dict[str, str], sentence: str
):
    put_secret(cluster)
    put_pod(cluster, **pod)
    with pytest.raises(LeafRefusedError, match=sentence):
        await LeafIssuer(cluster, ROOT).issue("token", csr(OWN))


async def test_replicas_share_one_root_and_a_damaged_one_is_never_replaced(cluster: Cluster):
    first = await load_root(cluster, "kvpool-system", "kvpool-authority")
    assert await load_root(cluster, "kvpool-system", "kvpool-authority") == first
    live = await cluster.get(ObjectRef("Secret", "kvpool-system", "kvpool-authority"))
    assert live is not None
    cluster.put({**live, "data": {"root": "c2hvcnQ="}})
    with pytest.raises(ApiUnavailableError, match="restore it, or delete it"):
        await load_root(cluster, "kvpool-system", "kvpool-authority")


def test_claims_name_pool_and_pod():
    found = read_claims(review())
    assert (found.namespace, found.pool, found.pod_uid, found.node) == (NS, POOL, "u1", NODE)


@pytest.fixture
async def url(cluster: Cluster) -> AsyncIterator[str]:
    put_secret(cluster)
    server = IssuingServer(LeafIssuer(cluster, ROOT), OperatorMetrics(), clock=lambda: 1.0)
    async with serve_issuer("127.0.0.1", 0, ROOT, server) as port:
        yield f"https://127.0.0.1:{port}/v1/leaf"


async def post(url: str, body: bytes, token: str = "token") -> tuple[int, Any]:
    context = ssl.create_default_context(cadata=ROOT.issuer_authority().certificate_pem.decode())
    headers = {"Authorization": f"Bearer {token}"}
    async with (
        aiohttp.ClientSession() as session,
        session.post(url, data=body, headers=headers, ssl=context, server_hostname=ISSUER_NAME) as answer,
    ):
        return answer.status, await answer.json(content_type=None) if answer.status != 413 else None


async def test_the_server_answers_with_a_certificate_or_a_sentence(url: str, cluster: Cluster):
    good = json.dumps({"csr": csr(OWN).decode()}).encode()
    status, answer = await post(url, good)
    assert status == 200
    assert "BEGIN CERTIFICATE" in answer["certificate"]
    for body in (b"", b"[]", b"{}", b'{"csr": 7}', b'{"csr": "\xff"}'):
        assert (await post(url, body))[0] == 400
    assert (await post(url, b"x" * (serving.MAX_BODY + 1)))[0] == 413
    assert (await post(url, good, token=""))[0] == 401
    assert (await post(url, good, token="t" * (serving.MAX_TOKEN + 1)))[0] == 401
    cluster.answer = {"status": {"authenticated": False}}
    status, answer = await post(url, good)
    assert (status, answer["error"]) == (403, "the token is not valid for this audience")


async def test_more_requests_than_the_api_server_should_get_are_sent_away(url: str):
    good = json.dumps({"csr": csr(OWN).decode()}).encode()
    statuses = [(await post(url, good))[0] for _ in range(serving.PER_SECOND + 3)]
    assert statuses == [200] * serving.PER_SECOND + [429] * 3
