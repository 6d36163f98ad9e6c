"""Hostile bytes after the greeting, and encryption between real sidecars."""

from __future__ import annotations

import contextlib
import os
import socket
import time

import pytest
from sc_nodes import MIB, PEER_PORT, wait_for
from sc_raw import SECRET as POOL_SECRET
from sc_raw import block_id, payload
from sc_tls import DAY, fetched, file_of, fresh_authority, key_pem

from kvpool.errors import PoolUnavailableError, RefusedError
from kvpool.protocol import keys, peer_wire, wire
from kvpool_sidecar.index.base import NodeInfo
from kvpool_sidecar.peers import ca as authority
from kvpool_sidecar.peers import server as peer_server
from kvpool_sidecar.peers.certificate import NodeIdentity
from kvpool_sidecar.peers.control import connect_tls
from kvpool_sidecar.peers.security import PeerSecurity
from kvpool_testing.blocks import key, put

# -- hostile bytes after the greeting


ZEROS = bytes(16), bytes(32), bytes(32)


@pytest.mark.parametrize("kind", [None, *peer_wire.PeerKind, 0, 4, 255])
def test_noise_instead_of_tls_is_cut_off(far, near, kind):
    there = far()
    for data in (b"", os.urandom(500), b"\x16\x03\x01\xff\xff" + os.urandom(70_000), b"\x16\x03\x01\x00\x01\x01"):
        with socket.create_connection((there.info.host, there.info.port), timeout=10) as sock:
            sock.settimeout(10)
            with contextlib.suppress(OSError):
                sock.sendall(data if kind is None else peer_wire.PEER_CLIENT.pack(kind, *ZEROS) + data)
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(65536):
                    pass
    wait_for(lambda: there.server.connections == 0, "all are closed")
    assert fetched(near(), there.info) == file_of(1, 300_000)


def test_a_tls_handshake_that_drips_is_cut_off(far, monkeypatch):
    monkeypatch.setattr(peer_server, "_HANDSHAKE_S", 0.4)
    there = far()
    address = (there.info.host, there.info.port)
    with socket.create_connection(address, timeout=10) as sock, contextlib.suppress(OSError):
        for byte in b"\x16\x03\x01\x02\x00" + bytes(500):
            sock.sendall(bytes([byte]))
            time.sleep(0.02)
            if there.server.connections == 0:
                break
    wait_for(lambda: there.server.connections == 0, "cut off")


def test_a_control_channel_that_asks_for_too_much_is_ended(far, near):
    there, here = far(), near()
    for count in (0, peer_wire.MAX_TICKETS + 1, 0xFFFFFFFF):
        tls = connect_tls(there.info, here.identity, peer_wire.PeerKind.CONTROL, time.monotonic() + 10)
        tls.sendall(peer_wire.PEER_TICKETS.pack(wire.MAGIC, count))
        assert tls.recv(100) == b""
        tls.close()
    assert not there.security.ticket_issuer._issued


def test_a_client_that_does_not_read_an_encrypted_stream_stops_the_peer(far, near, store):
    there, here = far("Always"), near("Always")
    for n in range(10, 20):
        put(store, n, 8 * MIB)
    link = here.dial(there.info, 10)
    link.request([key(n) for n in range(10, 20)])
    wait_for(lambda: there.stats.whole("peer_served").get("blocks", 0) >= 0 and link.received() > 0, "it has begun")
    link.close()
    wait_for(lambda: there.server.connections == 0, "the peer has noticed")
    assert there.stats.whole("peer_served").get("blocks", 0) <= 3


# -- real sidecars


@pytest.mark.parametrize("encryption", ["ControlOnly", "Always"])
def test_real_sidecars_read_from_each_other_and_say_how(cluster, encryption):
    from kvpool.config import PeerConfig

    peer = PeerConfig(port=PEER_PORT, connect_timeout_ms=1000, encryption=encryption)
    c = cluster()
    a, b = c.node("a", peer=peer), c.node("b", peer=peer)
    blocks = {block_id(n): payload(n, 3 * MIB) for n in range(6)}
    with a.connect() as raw:
        raw.put(blocks)
    a.wait_announced()
    for _ in range(2):
        with b.connect() as raw:
            assert all(got == blocks[name] for name, got in zip(blocks, raw.get(list(blocks), ms=20_000), strict=True))
    status = b.status()
    assert status["peers"]["encryption"] == encryption
    assert 0 < status["peers"]["certificate_seconds_left"] <= DAY.total_seconds()
    assert "kvpool_sidecar_peer_certificate_expiry_timestamp_seconds " in b.get("/metrics").decode()
    assert a.status()["refused"] == {}


def test_a_sidecar_takes_the_authority_of_its_secret(cluster):
    c = cluster()
    one = fresh_authority()
    (c.secret / "peer-ca.crt").write_text(one.pem)
    (c.secret / "peer-ca.key").write_bytes(key_pem(one))
    a = c.node("a")
    info = NodeInfo("a", a.address, PEER_PORT, 1)
    ours = PeerSecurity(NodeIdentity(lambda: authority.TrustBundle(one), "pool-uid", "x"))
    assert ours._control_channels.ticket(info, time.monotonic() + 10)
    derived = authority.derived(keys.peer_secret(POOL_SECRET, "pool-uid"))
    theirs = PeerSecurity(NodeIdentity(lambda: authority.TrustBundle(derived), "pool-uid", "x"))
    with pytest.raises((RefusedError, PoolUnavailableError)):
        theirs._control_channels.ticket(info, time.monotonic() + 10)
    ours.close()
    theirs.close()
