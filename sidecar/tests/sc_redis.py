"""Real Redis servers on loopback addresses of their own: with replicas and Sentinels, as a Cluster, behind TLS."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import select
import signal
import socket
import ssl
import subprocess
import threading
from typing import TYPE_CHECKING

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from sc_nodes import fresh_address, wait_for

from kvpool_sidecar.index import redis_server as embedded
from kvpool_sidecar.index.redis_connection import Login, RedisConnection

if TYPE_CHECKING:
    from pathlib import Path

PORT, SENTINEL_PORT = 16379, 16380
PASSWORD = "index password"
ACL = (
    "on >{password} resetchannels ~b* ~n:* ~N:* ~s:* ~nodes ~epoch* -@all +auth +select +ping +get +mget +set +append "
    "+del +incrby +pexpire +watch +unwatch +multi +exec +discard +scan +info +asking +cluster|slots"
)
"""The rights that docs/reference/prefix-index.md asks users to grant."""


def plain(address, port=PORT, **user):
    """A client that does not try again."""
    return redis.Redis(
        host=address, port=port, protocol=2, retry=Retry(NoBackoff(), 0), socket_timeout=5, driver_info=None, **user
    )


class Server:
    """One redis-server process; `client` is allowed everything."""

    def __init__(self, directory: Path, *options: str, port: int = PORT, config: str = "") -> None:
        self.address, self.port = fresh_address(), port
        self.directory = directory
        directory.mkdir(exist_ok=True)
        file = directory / "redis.conf"
        file.write_text(config.format(address=self.address))
        self.command = [embedded.server_binary(), str(file), *([] if port == PORT else ["--sentinel"])]
        # replicas connect, and are announced, by their own address
        self.command += ["--bind-source-addr", self.address]
        self.command += ["--bind", self.address, "--port", str(port), "--dir", str(directory), "--save", "", *options]
        self.process = None
        self.client = plain(self.address, port)

    @property
    def endpoint(self) -> str:
        return f"{self.address}:{self.port}"

    def start(self):
        with (self.directory / "log").open("ab") as log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log)
        wait_for(self.answers, "redis-server answers")
        return self

    def answers(self) -> bool:
        try:
            return bool(self.client.ping())
        except (redis.AuthenticationError, redis.exceptions.BusyLoadingError):
            return True
        except (redis.ConnectionError, redis.TimeoutError):
            return False

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.client.close()
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
            self.process = None


class Servers:
    """Ends what it started."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.all: list[Server] = []

    def make(self, name: str, *options: str, **kw) -> Server:
        server = Server(self.directory / name, *options, **kw)
        self.all.append(server)
        return server.start()

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        for server in self.all:
            server.kill()


class Sentinels(Servers):
    """A master, a replica and a Sentinel that promotes it; all want the password."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        secret = ("--requirepass", PASSWORD, "--masterauth", PASSWORD, "--repl-diskless-sync-delay", "0")
        self.first = self.make("first", *secret)
        self.second = self.make("second", "--replicaof", self.first.address, str(PORT), *secret)
        for server in (self.first, self.second):
            server.client = plain(server.address, password=PASSWORD)
        wait_for(lambda: self.second.client.info("replication")["master_link_status"] == "up", "the replica follows")
        watch = (
            f"sentinel monitor blocks {self.first.address} {PORT} 1\nsentinel auth-pass blocks {PASSWORD!r}\n"
            "sentinel down-after-milliseconds blocks 700\nsentinel failover-timeout blocks 3000\n"
        ).replace("'", '"')
        self.sentinel = self.make("sentinel", port=SENTINEL_PORT, config=watch)
        wait_for(lambda: self.sentinel.client.sentinel_slaves("blocks"), "the Sentinel knows the replica")
        self.url = f"redis+sentinel://{fresh_address()}:{SENTINEL_PORT},{self.sentinel.endpoint}/blocks/0"

    @property
    def master(self) -> Server:
        address = self.sentinel.client.sentinel_get_master_addr_by_name("blocks")[0].decode()
        return next(server for server in (self.first, self.second) if server.address == address)


class Cluster(Servers):
    """Three masters and a replica of the first."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        options = (
            "--cluster-enabled",
            "yes",
            "--cluster-node-timeout",
            "1500",
            "--cluster-require-full-coverage",
            "no",
        )
        options += ("--cluster-replica-validity-factor", "0", "--repl-diskless-sync-delay", "0")
        acl = f"user kvpool {ACL.format(password='secret')}\n"
        self.masters = [self.make(f"master-{n}", *options, config=acl) for n in range(3)]
        self.replica = self.make("replica", *options, config=acl)
        for n, server in enumerate(self.masters):
            server.client.execute_command("CLUSTER", "ADDSLOTS", *_slots(n))
        for server in self.all[1:]:
            server.client.execute_command("CLUSTER", "MEET", self.all[0].address, PORT)
        wait_for(lambda: all(len(_nodes(s)) == 4 for s in self.all), "they know each other")
        self.replica.client.execute_command("CLUSTER", "REPLICATE", _nodes(self.masters[0])["myself"])
        wait_for(
            lambda: all("cluster_state:ok" in _raw(s, "CLUSTER", "INFO") for s in self.all), "the cluster is whole"
        )
        wait_for(lambda: self.replica.client.info("replication")["master_link_status"] == "up", "the replica follows")
        self.url = f"redis+cluster://{fresh_address()}:{PORT},{self.masters[1].endpoint}"

    def flush(self) -> None:
        for server in self.all:
            with contextlib.suppress(redis.ReadOnlyError, redis.ConnectionError):
                server.client.flushall()


def _slots(n: int) -> range:
    return range(n * 5461, (n + 1) * 5461 if n < 2 else 16384)


def _raw(server: Server, *command: str) -> str:
    """An answer as the server gives it: the library would take it apart."""
    link = RedisConnection((server.address, server.port), Login(), 5.0)
    try:
        return link.execute([command])[0].decode()
    finally:
        link.close()


def _nodes(server: Server) -> dict[str, str]:
    """Names by address; the server itself is `myself`."""
    lines = [line.split() for line in _raw(server, "CLUSTER", "NODES").splitlines()]
    return {("myself" if "myself" in flags else address): name for name, address, flags, *_ in lines}


# -- TLS


def certificates(directory: Path, address: str) -> None:
    """ca.crt, server.crt, server.key (for `address`), client.crt, client.key."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    now = datetime.datetime.now(datetime.timezone.utc)
    authority = ec.generate_private_key(ec.SECP256R1())
    issuer = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test authority")])

    def make(name: str, key, extension, critical: bool) -> None:
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)]) if name != "ca" else issuer
        certificate = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(extension, critical)
            .sign(authority, hashes.SHA256())
        )
        (directory / f"{name}.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        if name != "ca":
            text = key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
            (directory / f"{name}.key").write_bytes(text)

    make("ca", authority, x509.BasicConstraints(ca=True, path_length=0), True)
    names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))])
    make("server", ec.generate_private_key(ec.SECP256R1()), names, False)
    make("client", ec.generate_private_key(ec.SECP256R1()), x509.BasicConstraints(ca=False, path_length=None), False)


class TlsFront:
    """TLS in front of a server, for the embedded Redis has none. Wants a client certificate of the same authority."""

    def __init__(self, directory: Path, behind: tuple[str, int]) -> None:
        self.address = fresh_address()
        certificates(directory, self.address)
        self._context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(directory / "ca.crt"))
        self._context.verify_mode = ssl.CERT_REQUIRED
        self._context.load_cert_chain(directory / "server.crt", directory / "server.key")
        self._behind = behind
        self._listener = socket.create_server((self.address, PORT))
        self._sockets: list[socket.socket] = [self._listener]
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def endpoint(self) -> str:
        return f"{self.address}:{PORT}"

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, raw: socket.socket) -> None:
        with (
            contextlib.suppress(OSError),
            raw,
            self._context.wrap_socket(raw, server_side=True) as client,
            socket.create_connection(self._behind) as server,
        ):
            self._sockets += [client, server]
            while True:
                ready = [client] if client.pending() else select.select([client, server], [], [])[0]
                for source, sink in ((client, server), (server, client)):
                    if source in ready:
                        data = source.recv(65536)
                        if not data:
                            return
                        sink.sendall(data)

    def close(self) -> None:
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
