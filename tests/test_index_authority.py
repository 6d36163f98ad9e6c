"""The certificate that the operator issues for a managed index is the one that sidecars believe, at a real server."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from kvpool.errors import RetryableError
from kvpool_operator.pki.index_tls import INDEX_CA, INDEX_SERVER_CERT, INDEX_SERVER_KEY, index_files
from kvpool_sidecar.index.credentials import IndexCredentials, Passwords
from kvpool_sidecar.index.redis_index import RedisIndex
from kvpool_testing.index import A

SCRIPT = Path(__file__).resolve().parents[1] / "images" / "index-server.sh"
SERVER = Path(subprocess.run([SCRIPT, "--path"], capture_output=True, text=True, check=True).stdout.strip())


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@pytest.mark.skipif(not SERVER.exists(), reason=f"no server with TLS: {SCRIPT.name} builds it (4 minutes)")
def test_sidecars_believe_the_index_that_has_the_operators_certificate_and_no_other(tmp_path: Path):
    files = index_files({}, ("localhost",), datetime.now(UTC))
    other = index_files({}, ("localhost",), datetime.now(UTC))
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "index-password").write_text("pw")
    (secret / "index-server.crt").write_text(files[INDEX_SERVER_CERT])
    (secret / "index-server.key").write_text(files[INDEX_SERVER_KEY])
    (tmp_path / "ca").write_text(files[INDEX_CA])
    (tmp_path / "other").write_text(other[INDEX_CA])
    address = str(ipaddress.ip_address(socket.gethostbyname("localhost")))
    port = free_port()
    command = [sys.executable, "-m", "kvpool_sidecar", "index-server", "--tls", "--bind", address, "--port", str(port)]
    command += ["--dir", str(tmp_path / "data"), "--secret-dir", str(secret)]
    process = subprocess.Popen(command, env={**os.environ, "KVPOOL_INDEX_SERVER": str(SERVER)})

    def joins(ca: str, host: str = "localhost") -> bool:
        credentials = IndexCredentials("kvpool", Passwords.fixed("pw"), ca=str(tmp_path / ca))
        with contextlib.closing(RedisIndex(f"rediss://{host}:{port}/0", credentials=credentials)) as index:
            with contextlib.suppress(RetryableError):
                return bool(index.join(A))
            return False

    try:
        end = time.monotonic() + 60
        while not joins("ca"):
            assert process.poll() is None
            assert time.monotonic() < end, "the index never served"
            time.sleep(0.1)
        assert not joins("other")
        assert not joins("ca", host=address), "the certificate names the Service, not an address"
    finally:
        process.kill()
        process.wait()
