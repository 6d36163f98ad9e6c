"""The operator by hand: its certificate, and its calls to a sidecar's port for orders."""

from __future__ import annotations

import http.client
import json
import os
import ssl
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from sc_nodes import wait_for
from sc_raw import SECRET

from kvpool.protocol import keys
from kvpool.protocol.certificate_names import node_name, operator_name
from kvpool_sidecar.peers import ca as authority

if TYPE_CHECKING:
    from sc_nodes import Node

ADMIN_PORT = 17423
UID = "pool-uid"


def ca(uid: str = UID, secret: bytes = SECRET) -> authority.CertificateAuthority:
    """As sidecars derive it where the Secret has none."""
    return authority.derived(keys.peer_secret(secret, uid))


def context(
    name: str,
    signer: authority.CertificateAuthority | None = None,
    trusted: authority.CertificateAuthority | None = None,
) -> ssl.SSLContext:
    """Of somebody called so, whom `signer` vouches for and who trusts `trusted`: the pool's own."""
    leaf = authority.issue(signer or ca(), name, datetime.now(UTC))
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    made.load_verify_locations(cadata=(trusted or ca()).pem)
    memory = os.memfd_create("leaf", os.MFD_CLOEXEC)
    os.write(memory, leaf.pem)
    made.load_cert_chain(f"/proc/self/fd/{memory}")
    os.close(memory)
    return made


class _Connection(http.client.HTTPSConnection):
    """To a name that no resolver knows."""

    def __init__(self, address: str, port: int, name: str, tls: ssl.SSLContext) -> None:
        super().__init__(address, port, context=tls, timeout=10)
        self._name = name
        self._tls = tls

    def connect(self) -> None:
        http.client.HTTPConnection.connect(self)
        self.sock = self._tls.wrap_socket(self.sock, server_hostname=self._name)


class Operator:
    """Of the pool; `node` is what the sidecar's certificate must say."""

    def __init__(
        self, address: str, node: str, port: int = ADMIN_PORT, tls: ssl.SSLContext | None = None, uid: str = UID
    ) -> None:
        self.address, self.node, self.port, self.uid = address, node, port, uid
        self.tls = tls or context(operator_name(uid))

    @classmethod
    def of(cls, node: Node) -> Operator:
        return cls(node.address, node.name, node.pool.admin_port)

    @classmethod
    def of_pool(cls, address: str, node: str, port: int, uid: str, secret: bytes) -> Operator:
        """Of another pool than that of these tests."""
        own = ca(uid, secret)
        return cls(address, node, port, context(operator_name(uid), own, own), uid)

    def call(self, method: str, path: str, body: bytes | None = None, headers=None) -> tuple[int, dict]:
        connection = _Connection(self.address, self.port, node_name(self.uid, self.node), self.tls)
        try:
            connection.request(method, path, body, headers or {})
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    def start(self, name: str, kind: str, **params) -> tuple[int, dict]:
        body = json.dumps({"id": name, "kind": kind, "params": params}).encode()
        return self.call("POST", "/v1/operations", body)

    def poll(self, name: str) -> dict:
        status, report = self.call("GET", f"/v1/operations/{name}")
        assert status == 200, report
        return report

    def run(self, name: str, kind: str, **params) -> dict:
        """Start it and wait for its end."""
        status, report = self.start(name, kind, **params)
        assert status == 200, report

        def ended():
            report = self.poll(name)
            return report["state"] != "Running" and report

        return wait_for(ended, f"{kind} ends", timeout=60)
