"""A certificate that somebody else keeps: real files, real TLS, changes while it is served."""

import asyncio
import json
import os
import ssl
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from aiohttp import ClientConnectorCertificateError
from test_op_webhook_server import REVIEW, Caller, Cluster, settings

from kvpool_operator.pki.certificates import CertPolicy, issue_leaf, new_authority
from kvpool_operator.webhook.api_access import WebhookApiClient
from kvpool_operator.webhook.file_certificates import MOST_BYTES, FileCertificates
from kvpool_operator.webhook.self_signed import server_context
from kvpool_operator.webhook.server import serve

DNS = ("kvpool-webhook.kvpool-system.svc",)
POLICY = CertPolicy()


def authority():
    return new_authority("somebody", DNS, datetime.now(UTC), POLICY)


class Mounted:
    """A Secret as the kubelet mounts it: a link is turned to a new directory, so that both files change at once."""

    def __init__(self, root):
        self.root, self.count = root, 0

    def put(self, certificate, key):
        self.count += 1
        folder = self.root / f"..{self.count}"
        folder.mkdir()
        (folder / "tls.crt").write_bytes(certificate)
        (folder / "tls.key").write_bytes(key)
        link = self.root / "link"
        link.symlink_to(folder)
        os.replace(link, self.root / "data")
        return self.root / "data"

    def issue(self, signer):
        leaf = issue_leaf(signer, DNS, datetime.now(UTC), POLICY)
        return self.put(leaf.certificate_pem, leaf.key_pem)


class Authority:
    """The cluster's part: a bundle that somebody else wrote."""

    def __init__(self, *authorities):
        self.trusted = b"".join(a.certificate_pem for a in authorities).decode()


async def test_the_webhook_serves_what_is_mounted_and_follows_it(tmp_path):
    old, new = authority(), authority()
    mounted, cluster = Mounted(tmp_path), Cluster()
    where = replace(settings(), certificate_dir=str(mounted.issue(old)), certificate_poll_s=0.1)
    store = WebhookApiClient(cluster, where)
    async with serve(where, store, store, store), Caller(where, Authority(old)) as caller:
        await caller.ready()
        assert (await caller.post(json.dumps(REVIEW)))[0] == 200
        _, text = await caller.admin("/metrics")
        assert "kvpool_webhook_authority_expiry_timestamp_seconds 0.0" in text
        caller.cluster = Authority(old, new)  # trusted before it signs
        mounted.issue(new)
        while True:
            assert (await caller.post(json.dumps(REVIEW)))[0] == 200, "no handshake fails in between"
            caller.cluster = Authority(new)
            try:
                assert (await caller.post(json.dumps(REVIEW)))[0] == 200
                break
            except ClientConnectorCertificateError:
                caller.cluster = Authority(old, new)
                await asyncio.sleep(0.02)
    hooks = [o for r, o in cluster.objects.items() if r.kind == "MutatingWebhookConfiguration"]
    assert "caBundle" not in json.dumps(hooks), "that is somebody else's"
    assert not [r for r in cluster.objects if r.kind == "Secret"]


def test_files_that_do_not_belong_together_leave_the_last_ones_in_use(tmp_path):
    mounted, one, two = Mounted(tmp_path), authority(), authority()
    certs = FileCertificates(mounted.issue(one), server_context())
    certs.step()
    served = certs.expires
    leaf, other = (issue_leaf(a, DNS, datetime.now(UTC) + timedelta(hours=1), POLICY) for a in (one, two))
    for certificate, key, error in (
        (leaf.certificate_pem, other.key_pem, ssl.SSLError),
        (b"no certificate", leaf.key_pem, ValueError),
        (leaf.certificate_pem, b"", ssl.SSLError),
        (b" " * (MOST_BYTES + 1), leaf.key_pem, ValueError),
    ):
        mounted.put(certificate, key)
        with pytest.raises(error):
            certs.step()
        assert certs.ready
        assert certs.expires == served
    mounted.put(leaf.certificate_pem, leaf.key_pem)
    certs.step()
    assert certs.expires == leaf.expires != served


def test_not_ready_without_files_or_when_they_have_run_out(tmp_path):
    now = [datetime.now(UTC)]
    certs = FileCertificates(tmp_path / "data", server_context(), clock=lambda: now[0])
    with pytest.raises(FileNotFoundError):
        certs.step()
    assert not certs.ready
    Mounted(tmp_path).issue(authority())
    certs.step()
    assert certs.ready
    now[0] += timedelta(days=8)
    assert not certs.ready


async def test_a_half_written_pair_costs_no_handshake(tmp_path, caplog):
    old, new = authority(), authority()
    mounted = Mounted(tmp_path)
    where = replace(settings(), certificate_dir=str(mounted.issue(old)), certificate_poll_s=0.05)
    store = WebhookApiClient(Cluster(), where)
    async with serve(where, store, store, store), Caller(where, Authority(old)) as caller:
        await caller.ready()
        leaf, other = (issue_leaf(a, DNS, datetime.now(UTC), POLICY) for a in (new, old))
        mounted.put(leaf.certificate_pem, other.key_pem)
        while "no valid certificate" not in caplog.text:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert (await caller.post(json.dumps(REVIEW)))[0] == 200


async def test_the_loop_waits_for_files_to_come(tmp_path, caplog):
    certs = FileCertificates(tmp_path / "data", server_context(), poll_s=0.01)
    task = asyncio.create_task(certs.run())
    while "no valid certificate" not in caplog.text:  # noqa: ASYNC110  what is waited for sets no event
        await asyncio.sleep(0.005)
    Mounted(tmp_path).issue(authority())
    while not certs.ready:  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
