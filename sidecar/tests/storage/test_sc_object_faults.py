"""An object store that is away, hung, slow, full of errors or lying costs its own blocks, and nothing waits for it."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import hmac
import ipaddress
import os
import signal
import ssl
import time

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from sc_nodes import wait_for
from sc_s3 import KEY, SECRET, Proxy, S3Server, error_answer, s3_bucket, storage_options

from kvpool import config
from kvpool.errors import ConfigError
from kvpool_sidecar.replication.write_back import copy_block
from kvpool_sidecar.storage.base import CommitOutcome
from kvpool_sidecar.storage.buckets.http import HttpResponse
from kvpool_sidecar.storage.buckets.options import open_bucket, read_options
from kvpool_sidecar.storage.buckets.rotating import RotatingBucket
from kvpool_sidecar.storage.buckets.s3 import S3Bucket
from kvpool_sidecar.storage.memory import MemoryStore
from kvpool_sidecar.storage.shared.object_store import ObjectStore, ObjectStoreSettings
from kvpool_sidecar.storage.shared.tier import SharedTier
from kvpool_testing.blocks import key, payload, put, read

MAX = 16 << 20
SIZE = 6 << 20  # two pieces


@pytest.fixture(scope="module")
def s3(tmp_path_factory):
    server = S3Server(tmp_path_factory.mktemp("s3") / "s3.log").start()
    server.make_bucket("kvpool")
    yield server
    server.stop()


@pytest.fixture
def proxy(s3):
    one = Proxy(s3.address)
    yield one
    one.close()


@pytest.fixture
def tier(s3, proxy):
    """A tier behind the proxy with blocks 1 and 2 in it."""
    store = ObjectStore(s3_bucket(proxy.url, "s3://kvpool/faults", read_timeout_s=1), ObjectStoreSettings("u", MAX))
    for n in (1, 2):
        wait_for(lambda n=n: there(store, n), "stored")
    shared = SharedTier(store, cooldown_s=0.2)
    yield shared
    shared.close()
    store.close()


def there(store, n):
    with contextlib.suppress(OSError):  # a busy machine
        return store.contains(key(n)) or put(store, n, SIZE)
    return False


def opened(tier, n, timeout_s=1.0):
    (found,) = tier.open_many([key(n)], timeout_s)
    if found is None:
        return None
    return read(Opened(found), n)


class Opened:
    """A block that is open already, as `read` wants it."""

    def __init__(self, found):
        self.found = found

    def open(self, _key):
        return self.found


FAULTS = {
    "500": lambda p: setattr(p, "answer", error_answer(500, "InternalError")),
    "503 slow down": lambda p: setattr(p, "answer", error_answer(503, "SlowDown")),
    "access denied": lambda p: setattr(p, "answer", error_answer(403, "AccessDenied")),
    "not HTTP": lambda p: setattr(p, "answer", b"\x00\xff" * 50),
    "cut mid-read": lambda p: setattr(p, "cut_after", 2 << 20),
    "stalled mid-read": lambda p: setattr(p, "stall_after", 2 << 20),
    "an answer without an end": lambda p: setattr(p, "answer", b"HTTP/1.1 200 OK\r\nContent-Length: 99999\r\n\r\nabc"),
    "a length that is a lie": lambda p: setattr(
        p, "answer", b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999\r\nETag: x\r\n\r\n"
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_a_miss_within_the_deadline_and_heals(tier, proxy, fault):
    FAULTS[fault](proxy)
    for _ in range(4):
        started = time.monotonic()
        assert opened(tier, 1) is None
        assert time.monotonic() - started < 10  # on a busy machine; the deadline is 1 s
    assert fault == "a length that is a lie" or tier.problem
    assert SECRET not in tier.problem
    proxy.heal()
    wait_for(lambda: opened(tier, 1, 10) == payload(1, SIZE), "it is used again", timeout=30)
    assert tier.problem == ""
    wait_for(lambda: tier.store._space.in_flight_bytes == 0, "nothing is on its way any more")


def test_wrong_bytes_are_a_miss_and_the_block_is_gone(tier, proxy, s3):
    put_again = s3_bucket(s3.url, "s3://kvpool/faults")
    proxy.flip_at = 3 << 20
    assert opened(tier, 2, 10) is None
    proxy.heal()
    assert opened(tier, 2, 10) is None
    put_again.close()


def test_bytes_that_the_network_spoilt_once_take_no_block_away(tier, proxy, monkeypatch):
    fetch, trials = tier.store._bucket.get_to_fd, []

    def spoilt_once(name, fd, size):
        fetch(name, fd, size)
        trials.append(1)
        if len(trials) == 1:
            os.pwrite(fd, b"rot", 5000)

    monkeypatch.setattr(tier.store._bucket, "get_to_fd", spoilt_once)
    assert opened(tier, 1, 10) == payload(1, SIZE)
    assert len(trials) == 2


def test_a_stopped_server_is_an_absent_tier_and_comes_back(s3, proxy):
    store = ObjectStore(s3_bucket(s3.url, "s3://kvpool/stopped", read_timeout_s=1), ObjectStoreSettings("u", MAX))
    put(store, 1, SIZE)
    tier = SharedTier(store, cooldown_s=0.2)
    s3.send(signal.SIGSTOP)
    try:
        slow = 0
        for _ in range(20):
            started = time.monotonic()
            assert tier.contains_many([key(5)], 0.05) == [False]
            slow += time.monotonic() - started > 0.04
        assert slow < 20  # the breaker opens: most calls cost nothing
        assert not tier.available
        local = MemoryStore(64 << 20)
        put(local, 3, SIZE)
        started = time.monotonic()
        with pytest.raises(OSError, match="s3://kvpool"):
            copy_block(local, store, key(3))
        assert time.monotonic() - started < 30
    finally:
        s3.send(signal.SIGCONT)
    wait_for(lambda: opened(tier, 1, 5) == payload(1, SIZE), "it is used again", timeout=30)
    wait_for(lambda: copy_block(local, store, key(3)) is True or store.contains(key(3)), "copied", timeout=30)
    assert read(store, 3) == payload(3, SIZE)
    local.close()
    tier.close()


def test_a_server_that_is_killed_mid_read_and_mid_write_leaves_nothing_half_done(tmp_path):
    server = S3Server(tmp_path / "s3.log").start()
    server.make_bucket("kvpool")
    proxy = Proxy(server.address)
    store = ObjectStore(s3_bucket(proxy.url, "s3://kvpool/x", read_timeout_s=1), ObjectStoreSettings("u", MAX))
    local = MemoryStore(64 << 20)
    try:
        for n in (1, 2):
            put(local, n, SIZE)
        copy_block(local, store, key(1))
        proxy.stall_after = 2 << 20
        tier = SharedTier(store, cooldown_s=0.2)
        assert tier.open_many([key(1)], 0.3) == [None]
        server.stop()
        proxy.heal()
        with pytest.raises(OSError, match="s3://kvpool"):
            copy_block(local, store, key(2))
        assert tier.contains_many([key(2)], 5) == [False]
        assert tier.problem
        server.start()  # empty: it keeps its objects in memory
        with pytest.raises(OSError, match="NoSuchBucket"):
            copy_block(local, store, key(2))
        server.make_bucket("kvpool")
        wait_for(lambda: copy_block(local, store, key(2)), "stored once the server is back", timeout=30)
        wait_for(lambda: opened(tier, 2, 10) == payload(2, SIZE), "read", timeout=30)
        wait_for(lambda: store._space.in_flight_bytes == 0, "nothing is on its way any more")
        assert store._space.promised_bytes == 0
        tier.close()
    finally:
        proxy.close()
        server.stop()
        store.close()
        local.close()


def test_a_bucket_that_is_missing_is_told_and_used_when_it_is_made(s3):
    store = ObjectStore(s3_bucket(s3.url, "s3://not-there/x"), ObjectStoreSettings("u", MAX))
    tier = SharedTier(store, cooldown_s=0.1)
    assert tier.contains_many([key(1)], 10) == [False]
    assert "bucket" in tier.problem.lower()
    s3.make_bucket("not-there")
    wait_for(lambda: tier.contains_many([key(1)], 10) == [False] and not tier.problem, "it is used")
    tier.close()
    store.close()


# -- the connections of S3


def tls_proxy(tmp_path, target):
    """The proxy behind TLS, and the file of its certificate."""
    key_pair = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "s3")])
    proxy = Proxy(target)
    host = proxy.url.removeprefix("http://").rpartition(":")[0]
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(name, name, key_pair.public_key(), 1, now, now + datetime.timedelta(days=1))
    builder = builder.add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(host))]), False)
    certificate = builder.sign(key_pair, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    private = key_pair.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (tmp_path / "ca").write_bytes(certificate)
    (tmp_path / "both.pem").write_bytes(certificate + private)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "both.pem")
    proxy.tls = context
    return proxy, tmp_path / "ca"


def test_by_tls_and_only_to_a_server_with_the_right_certificate(tmp_path, s3):
    proxy, ca = tls_proxy(tmp_path, s3.address)
    options = storage_options(proxy.url.replace("http:", "https:"))
    strangers = S3Bucket("s3://kvpool/tls", options, hidden=())
    with pytest.raises(OSError, match="certificate"):
        strangers.size("x")
    options["client_kwargs"]["verify"] = str(ca)
    store = ObjectStore(S3Bucket("s3://kvpool/tls", options, hidden=()), ObjectStoreSettings("u", MAX))
    assert put(store, 1, SIZE) == CommitOutcome.STORED
    assert read(store, 1) == payload(1, SIZE)
    store.close()
    strangers.close()
    proxy.close()


def signature(method, path, headers, region):
    """AWS signature version 4 of a request without a query, from its description and nothing else."""
    given = {k.lower(): v for k, v in headers.items()}
    scope = f"{given['x-amz-date'][:8]}/{region}/s3/aws4_request"
    names = given["authorization"].split("SignedHeaders=")[1].split(",")[0]
    lines = "".join(f"{n}:{given[n].strip()}\n" for n in names.split(";"))
    request = f"{method}\n{path}\n\n{lines}\n{names}\n{given['x-amz-content-sha256']}"
    text = f"AWS4-HMAC-SHA256\n{given['x-amz-date']}\n{scope}\n{hashlib.sha256(request.encode()).hexdigest()}"
    key_of_day = ("AWS4" + SECRET).encode()
    for part in scope.split("/"):
        key_of_day = hmac.digest(key_of_day, part.encode(), "sha256")
    return hmac.new(key_of_day, text.encode(), "sha256").hexdigest(), names.split(";")


@pytest.mark.parametrize(
    ("endpoint", "host", "path"),
    [
        ("http://minio:9000", "minio:9000", "/kvpool/a/b/x"),
        ("https://minio:443/", "minio", "/kvpool/a/b/x"),
        ("", "kvpool.s3.us-east-1.amazonaws.com", "/a/b/x"),
    ],
)
def test_requests_are_signed_as_aws_describes_it(monkeypatch, endpoint, host, path):
    options = storage_options(endpoint)
    if not endpoint:
        del options["endpoint_url"]
    bucket = S3Bucket("s3://kvpool/a/b", options)
    asked = []

    def exchange(method, target, headers, *_a, **_kw):
        asked.append((method, target, headers))
        return HttpResponse(200, 5)

    monkeypatch.setattr(bucket._connections, "request", exchange)
    bucket.size("x")
    bucket.put("x", 0, 7)
    for method, target, headers in asked:
        wanted, signed = signature(method, target, headers, "us-east-1")
        assert headers["Authorization"].endswith(f"Signature={wanted}")
        assert {"host", "x-amz-date", "x-amz-content-sha256"} <= set(signed)
        assert headers["Host"] == host
        assert target == path
    assert asked[1][2]["If-None-Match"] == "*"
    bucket.close()


def test_an_object_that_drips_is_given_up(proxy, s3, monkeypatch):
    bucket = s3_bucket(proxy.url, "s3://kvpool/drip")
    fd = os.memfd_create("x")
    os.write(fd, b"x" * 100_000)
    assert bucket.put("x", fd, 100_000)
    monkeypatch.setattr("kvpool_sidecar.storage.buckets.s3._CALL_S", 0.3)
    proxy.drip = True
    with pytest.raises(OSError, match="too slow"):
        bucket.get_to_fd("x", fd, 100_000)
    os.close(fd)
    bucket.close()


def test_a_connection_that_ended_while_it_waited_is_no_fault(proxy, s3):
    bucket = s3_bucket(proxy.url, "s3://kvpool/kept")
    for _ in range(3):
        assert bucket.size("nothing") is None
        proxy.drop()
    bucket.close()


# -- options


def tier_config(url="s3://bucket/x", **kw):
    return config.FsspecTier("far", url, **kw)


def test_a_secret_with_the_names_of_aws_or_of_fsspec(tmp_path):
    for name, text in {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET + "\n", "AWS_REGION": "eu-1"}.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "..data").mkdir()
    options = read_options(tier_config(endpoint="http://s3.example"), str(tmp_path))
    assert options.storage["key"] == KEY
    assert options.storage["secret"] == SECRET
    assert options.storage["client_kwargs"] == {"region_name": "eu-1"}
    assert options.storage["endpoint_url"] == "http://s3.example"
    assert set(options.hidden) == {KEY, SECRET}


@pytest.mark.parametrize("name", ["session", "asynchronous", "AWS_PROFILE"])
def test_a_key_of_the_secret_that_means_nothing_is_named_and_its_value_is_not(tmp_path, name):
    (tmp_path / name).write_text(SECRET)
    with pytest.raises(ConfigError, match=name) as reported:
        read_options(tier_config(), str(tmp_path))
    assert SECRET not in str(reported.value)


def test_a_secret_that_is_too_large_is_refused(tmp_path):
    (tmp_path / "key").write_text("x" * 70_000)
    with pytest.raises(ConfigError, match="larger"):
        read_options(tier_config(), str(tmp_path))


def test_no_secret_in_what_a_client_library_says(s3):
    from kvpool_sidecar.storage.buckets.fsspec import FsspecBucket

    bucket = FsspecBucket("s3://kvpool/x", storage_options(s3.url), hidden=(SECRET,))

    def leak(*_a, **_kw):
        raise RuntimeError(f"the key {SECRET} is wrong")

    bucket._fs._info = leak
    with pytest.raises(OSError, match=r"the key \*\*\* is wrong"):
        bucket.size("x")


def test_a_rotated_secret_is_used_and_a_broken_one_is_not(tmp_path, s3):
    (tmp_path / "key").write_text(KEY)
    (tmp_path / "secret").write_text(SECRET)
    one = tier_config("s3://kvpool/rotated", endpoint=s3.url, region="us-east-1")
    assert isinstance(open_bucket(one, str(tmp_path)), RotatingBucket)
    made = []
    bucket = RotatingBucket(
        "x", lambda: read_options(one, str(tmp_path)), lambda o: made.append(o) or o, poll_interval_s=0
    )
    bucket._now()
    assert len(made) == 1
    (tmp_path / "secret").write_text("another secret")
    assert bucket._now().storage["secret"] == "another secret"
    (tmp_path / "nonsense").write_text("x")
    assert bucket._now().storage["secret"] == "another secret"


def test_a_bucket_whose_secret_stays_is_not_made_anew(tmp_path, s3):
    (tmp_path / "key").write_text(KEY)
    (tmp_path / "secret").write_text(SECRET)
    bucket = open_bucket(tier_config("s3://kvpool/stays", endpoint=s3.url, region="us-east-1"), str(tmp_path))
    bucket._poll_interval_s = 0
    first = bucket._now()
    assert list(bucket.names("x")) == []  # the client library has written into its options by now
    assert bucket._now() is first
    bucket.close()
