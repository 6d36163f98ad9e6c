"""The managed index behind TLS, with a real server that has it: `images/index-server.sh` builds one."""

from __future__ import annotations

import contextlib
import shutil
import socket
import ssl
import subprocess
from pathlib import Path

import pytest
from sc_nodes import INDEX_PORT, Cluster, Process, fresh_address, wait_for
from sc_raw import block_id, payload
from sc_redis import certificates

from kvpool import config
from kvpool.errors import RetryableError
from kvpool.protocol import wire
from kvpool_sidecar.index.credentials import IndexCredentials, Passwords
from kvpool_sidecar.index.redis_index import RedisIndex
from kvpool_testing.index import A

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "images" / "index-server.sh"
SERVER = Path(subprocess.run([SCRIPT, "--path"], capture_output=True, text=True, check=True).stdout.strip())
PASSWORD = "index password"

pytestmark = pytest.mark.skipif(not SERVER.exists(), reason=f"no server with TLS: {SCRIPT.name} builds it (4 minutes)")


class TlsIndex(Process):
    """`kvpool-sidecar index-server --tls` as the operator runs it."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(exist_ok=True)
        self.address = fresh_address()
        self.secret = directory / "secret"
        self.secret.mkdir()
        (self.secret / "index-password").write_text(PASSWORD)
        self.renew(directory / "first")
        super().__init__(
            directory / "log",
            [
                "index-server", "--tls", f"--bind={self.address}", f"--port={INDEX_PORT}",
                f"--dir={directory / 'data'}", f"--secret-dir={self.secret}",
            ],
            env={"KVPOOL_INDEX_SERVER": str(SERVER)},
        )  # fmt: skip

    def renew(self, directory: Path) -> None:
        """Put a new certificate of a new authority into the Secret."""
        directory.mkdir()
        certificates(directory, self.address)
        for name in ("key", "crt"):
            shutil.copy(directory / f"server.{name}", self.secret / f"index-server.{name}")
        self.ca = directory / "ca.crt"

    def index(self, ca: str | None = None, password: str = PASSWORD, scheme: str = "rediss") -> RedisIndex:
        credentials = IndexCredentials("kvpool", Passwords.fixed(password), ca=str(self.ca) if ca is None else ca)
        return RedisIndex(f"{scheme}://{self.address}:{INDEX_PORT}/0", credentials=credentials)

    def serves(self, **kw) -> bool:
        with contextlib.closing(self.index(**kw)) as index, contextlib.suppress(RetryableError):
            return bool(index.join(A))
        return False

    def certificate(self) -> bytes:
        """The certificate that the server shows now."""
        context = ssl.create_default_context(cafile=str(self.ca))
        with (
            socket.create_connection((self.address, INDEX_PORT), 5) as raw,
            context.wrap_socket(raw, server_hostname=self.address) as sock,
        ):
            return sock.getpeercert(binary_form=True) or b""


@pytest.fixture
def index(tmp_path):
    made = TlsIndex(tmp_path / "index")
    try:
        made.start()
        wait_for(made.serves, "it serves")
        yield made
    finally:
        made.kill()


def test_nothing_gets_in_without_tls_the_authority_and_the_password(index, tmp_path):
    (tmp_path / "other").mkdir()
    certificates(tmp_path / "other", index.address)
    assert not index.serves(scheme="redis")
    assert not index.serves(ca="")
    assert not index.serves(ca=str(tmp_path / "other" / "ca.crt"))
    assert not index.serves(password="wrong")
    assert index.serves()


def test_a_renewed_certificate_is_served_without_a_restart_and_connections_stay(index, tmp_path):
    with contextlib.closing(index.index()) as held:
        number = held.join(A)
        before = index.certificate()
        index.renew(tmp_path / "second")

        def renewed() -> bool:
            with contextlib.suppress(ssl.SSLError):
                return index.certificate() != before
            return False

        wait_for(renewed, "the renewed certificate is shown")
        assert held.renew(number, A)  # over the connection that the first certificate opened
    assert index.serves()


def test_blocks_of_peers_are_found_through_the_index_behind_tls(index, tmp_path):
    (tmp_path / "c").mkdir()
    with Cluster(tmp_path / "c", index=False) as c:
        (c.secret / "index-password").write_text(PASSWORD)
        shutil.copy(index.ca, c.secret / "index-ca.crt")
        pool = {
            "index": config.IndexConfig(
                f"rediss://{index.address}:{INDEX_PORT}/0", username="kvpool", lookup_timeout_ms=1000
            )
        }
        a, b = c.node("a", **pool), c.node("b", **pool)
        block = block_id(1)
        with a.connect() as raw:
            raw.put({block: payload(1, 1000)})
        a.wait_announced()
        with b.connect() as raw:
            wait_for(lambda: raw.lookup([block]) == [wire.Tier.PEER], "b finds it")


def test_a_server_without_tls_says_so_and_does_not_listen(tmp_path):
    index = TlsIndex(tmp_path / "index")
    index.env.pop("KVPOOL_INDEX_SERVER")
    index.start()
    try:
        wait_for(lambda: not index.running, "it ended")
        assert "Failed finding TLS support" in index.log.read_text()
    finally:
        index.kill()


def test_a_server_of_another_image_serves_tls_with_the_prepared_file(tmp_path):
    index = TlsIndex(tmp_path / "index")
    index.arguments.append("--stage=prepare")
    assert index.start().process.wait(30) == 0
    server = subprocess.Popen([SERVER, tmp_path / "index" / "data" / "server.conf"])
    try:
        wait_for(index.serves, "it serves")
        assert not index.serves(scheme="redis")
    finally:
        server.kill()
        server.wait()
