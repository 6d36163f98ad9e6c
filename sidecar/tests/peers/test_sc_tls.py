"""Certificates and tickets between sidecars. Fault 19: they run out, the authority changes, the clock jumps."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from sc_nodes import MIB, fresh_address, wait_for
from sc_tls import DAY, SECRET, UID, Far, fetched, file_of, fresh_authority, key_pem, now

from kvpool.errors import ConfigError, KVPoolError, ProtocolError, RefusedError
from kvpool.protocol import keys, peer_wire, wire
from kvpool_sidecar.index.base import NodeInfo
from kvpool_sidecar.peers import ca as authority
from kvpool_sidecar.peers import tcp, tickets
from kvpool_sidecar.peers.connection import dial
from kvpool_sidecar.peers.control import connect_tls
from kvpool_sidecar.peers.tickets import TicketIssuer
from kvpool_testing.blocks import key, put

if TYPE_CHECKING:
    from kvpool_sidecar.peers.security import PeerSecurity


def test_a_node_that_was_replaced_at_its_address_is_asked_at_once(far, near, store):
    """The tickets of the process before it are refused: not a reason to leave its blocks alone."""
    peer, security = far(), near()
    expected = file_of(1, 300_000)
    assert fetched(security, peer.info) == expected
    peer.security.ticket_issuer = TicketIssuer()  # of another process, which knows none of those given out
    assert fetched(security, peer.info) == expected
    assert fetched(security, peer.info) == expected
    assert peer.stats.whole("refused") == {"peer-proof": 1}


@pytest.mark.parametrize("encryption", ["ControlOnly", "Always"])
def test_blocks_come_by_either_way(far, near, store, encryption):
    there, here = far(encryption), near(encryption)
    put(store, 2, 9 * MIB + 123)
    link = here.dial(there.info, 10)
    link.request([key(1), key(2), key(9)])
    link.request([key(1)])
    got = []
    for _ in range(4):
        size = link.response_size(time.monotonic() + 10)
        got.append(tcp.receive(link._socket, size, time.monotonic() + 10) if size else None)
    assert got == [file_of(1, 300_000), file_of(2, 9 * MIB + 123), None, file_of(1, 300_000)]
    assert link.alive
    assert not link.is_silent
    link.close()
    wait_for(lambda: there.server.connections == (0 if encryption == "Always" else 1), "only control is left")


def test_a_ticket_opens_one_connection_from_one_address_for_a_while():
    clock = [0.0]
    office = TicketIssuer(lambda: clock[0])
    one, two, three = office.issue("10.0.0.1", 3)
    assert office.redeem(one.name, "10.0.0.1") == one.key
    assert office.redeem(one.name, "10.0.0.1") is None
    assert office.redeem(two.name, "10.0.0.2") is None
    assert office.redeem(two.name, "10.0.0.1") is None  # used up by the attempt
    clock[0] = tickets.LIFE_S
    assert office.redeem(three.name, "10.0.0.1") is None
    assert office.redeem(os.urandom(16), "10.0.0.1") is None


def test_tickets_are_bounded_by_host_and_in_all(monkeypatch):
    office = TicketIssuer()
    for _ in range(20):
        office.issue("10.0.0.1", 1000)
    assert len(office._issued) == tickets.MAX_PER_HOST
    monkeypatch.setattr(tickets, "MAX_TICKETS", 100)
    other = office.issue("10.0.0.2", 1)[0]
    for n in range(3, 9):
        office.issue(f"10.0.0.{n}", 16)
    assert len(office._issued) <= 100
    assert office.redeem(other.name, "10.0.0.2") == other.key


def test_who_has_no_ticket_gets_no_data(far, near):
    there = far()
    address = (there.info.host, there.info.port)
    for kw in ({"secret": SECRET}, {"secret": keys.peer_secret(SECRET, UID)}, {"secret": bytes(32)}):
        with pytest.raises(KVPoolError):
            dial(*address, timeout_s=5, **kw)
        with pytest.raises(KVPoolError):
            dial(*address, timeout_s=5, ticket=os.urandom(16), **kw)
    ticket = near()._control_channels.ticket(there.info, time.monotonic() + 5)
    with pytest.raises(KVPoolError):
        dial(*address, secret=bytes(32), ticket=ticket.name, timeout_s=5)  # its name, not its key
    with pytest.raises(KVPoolError):
        dial(*address, secret=ticket.key, ticket=ticket.name, timeout_s=5)  # that attempt has used it up
    assert there.stats.whole("refused")["peer-proof"] == 8


def test_a_pool_that_encrypts_always_takes_no_plain_data(far, near):
    there, here = far("Always"), near("ControlOnly")
    with pytest.raises(KVPoolError):
        here.dial(there.info, 5)
    assert fetched(near("Always"), there.info) == file_of(1, 300_000)


@pytest.mark.parametrize("encryption", ["ControlOnly", "Always"])
def test_a_stranger_is_refused_by_both_sides(far, near, encryption):
    there = far(encryption)
    stranger = near(encryption, authorities=authority.TrustBundle(fresh_authority()))
    with pytest.raises(RefusedError):
        stranger.dial(there.info, 5)  # it does not believe the pool's node
    stranger.identity._client.check_hostname = False
    stranger.identity._client.verify_mode = ssl.CERT_NONE  # now it believes everybody; no one believes it
    with pytest.raises((KVPoolError, OSError)):
        fetched(stranger, there.info)
    wait_for(lambda: there.stats.whole("refused").get("peer-certificate"), "counted")


def test_a_connection_without_a_certificate_is_refused(far):
    there = far()
    sock = tcp.connect(there.info.host, there.info.port, time.monotonic() + 5)
    tcp.await_greeting(sock, time.monotonic() + 5)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    answer = b""
    with context.wrap_socket(sock) as tls, contextlib.suppress(OSError):
        tls.sendall(peer_wire.PEER_TLS.pack(peer_wire.PeerKind.CONTROL) + peer_wire.PEER_TICKETS.pack(wire.MAGIC, 1))
        answer = tls.recv(100)
    assert answer == b""
    wait_for(lambda: there.stats.whole("refused"), "counted")


def test_a_node_is_believed_to_be_itself_only(far, near):
    """An index that was tampered with cannot send a node to another one in the place of the one that it names."""
    there = far()
    with pytest.raises(RefusedError):
        near().dial(there.info._replace(node="c"), 5)


def test_a_node_of_another_pool_is_a_stranger(far, near):
    there = far()
    with pytest.raises(RefusedError):
        near(uid="another-pool").dial(there.info, 5)


def test_old_tls_is_not_spoken(far):
    there = far()
    sock = tcp.connect(there.info.host, there.info.port, time.monotonic() + 5)
    tcp.await_greeting(sock, time.monotonic() + 5)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(OSError, match="VERSION"):
        context.wrap_socket(sock)
    sock.close()


@pytest.mark.parametrize("magic", [b"KVPPEER1", b"KVPPEER2"])
def test_a_sidecar_of_a_former_version_is_refused_at_once(near, magic):
    """It sends its own greeting first; nothing is waited for."""
    listener = tcp.listen(fresh_address(), 0)
    host, port = listener.getsockname()

    def former():
        sock, _ = listener.accept()
        with sock:
            sock.sendall(magic + os.urandom(32))
            sock.settimeout(5)
            with contextlib.suppress(OSError):
                while sock.recv(1000):
                    pass

    thread = threading.Thread(target=former)
    thread.start()
    with pytest.raises(ProtocolError, match="version"):
        near().dial(NodeInfo("b", host, port, 1), 60)
    thread.join(10)
    listener.close()


def test_a_sidecar_of_a_former_version_refuses_this_one_at_once(far, near):
    """What it does: reads 40 bytes, and gives up if they do not begin with its own magic."""
    there = far()
    with socket.create_connection((there.info.host, there.info.port), timeout=5) as sock:
        hello = tcp.receive(sock, 40, time.monotonic() + 5)
    assert not hello.startswith((b"KVPPEER1", b"KVPPEER2"))
    assert fetched(near(), there.info) is not None


# -- fault 19


def test_no_handshake_fails_while_leaves_are_renewed_again_and_again(far, near):
    """Leaves of six seconds; a new connection every few milliseconds for several of their lives."""
    there, here = far(life=timedelta(seconds=6)), near(life=timedelta(seconds=6))
    there.security.identity.start()
    here.identity.start()
    leaves = set()
    done, until = 0, time.monotonic() + 60
    while len(leaves) < 3:
        connect_tls(there.info, here.identity, peer_wire.PeerKind.CONTROL, time.monotonic() + 10).close()
        leaves.add(there.security.identity._leaf.expires)
        done += 1
        assert time.monotonic() < until
    assert done > 10
    assert there.stats.whole("refused") == {}


def test_the_authority_rotates_and_no_handshake_fails(far, near):
    old, new = fresh_authority(now() - 200 * DAY), fresh_authority(now())
    phases = [
        authority.TrustBundle(old),
        authority.TrustBundle(new, previous=old),  # published, not yet signing
        authority.TrustBundle(fresh_settled(new), previous=old),  # settled: signs
        authority.TrustBundle(fresh_settled(new)),
    ]
    at = {"a": 0, "b": 0}
    there = far(authorities=lambda: phases[at["b"]])
    here = near(authorities=lambda: phases[at["a"]])
    signers = []
    for step in range(1, 7):  # the two nodes see each change one after the other
        node = "a" if step % 2 else "b"
        at[node] = (step + 1) // 2
        (here.identity if node == "a" else there.security.identity).refresh()
        assert fetched(here, there.info) == file_of(1, 300_000)
        connect_tls(there.info, here.identity, peer_wire.PeerKind.CONTROL, time.monotonic() + 10).close()
        signers.append(here.identity._leaf.issuer.public_key() == new.certificate.public_key())
    assert signers == [False, False, True, True, True, True]
    assert there.stats.whole("refused") == {}


def fresh_settled(one: authority.CertificateAuthority) -> authority.CertificateAuthority:
    """The same authority, some time later: as if it had been made an hour ago."""
    start = now() - timedelta(hours=1)
    return authority.CertificateAuthority(authority._self_signed(one.key, start, start + 365 * DAY), one.key)


def test_a_clock_that_jumps_leaves_the_node_with_a_certificate_of_the_new_time(far, near):
    ahead = [timedelta(0)]
    here = near(clock=lambda: now() + ahead[0])
    there = far()
    assert fetched(here, there.info)
    first = here.identity._leaf
    ahead[0] = 8 * DAY
    here.identity.refresh()
    assert here.identity._leaf.made - first.made > 7 * DAY
    ahead[0] = timedelta(0)  # and back: the leaf is of a time that has not come yet
    with pytest.raises(KVPoolError):
        connect_and_ask(there, here)
    here.identity.refresh()
    connect_and_ask(there, here)
    assert abs(here.identity.seconds_left - DAY.total_seconds()) < 3600


def connect_and_ask(there: Far, here: PeerSecurity) -> None:
    """A control channel of its own, and a ticket over it."""
    here._control_channels.close()
    here._control_channels.ticket(there.info, time.monotonic() + 10)


def test_an_expired_certificate_is_refused_and_that_shows(far, near):
    there = far()
    here = near(clock=lambda: now() - 3 * DAY)  # its clock stands: it thinks that its leaf is good
    with pytest.raises(KVPoolError):
        connect_and_ask(there, here)
    wait_for(lambda: there.stats.whole("refused") == {"peer-certificate": 1}, "the serving side counts it")
    late = far(clock=lambda: now() - 3 * DAY)
    with pytest.raises(RefusedError, match="expired"):
        near().dial(late.info, 5)


def test_a_control_channel_does_not_outlive_the_certificate_that_opened_it(far, near):
    there, here = far(), near(life=timedelta(seconds=1.5))
    here._control_channels.ticket(there.info, time.monotonic() + 10)
    wait_for(lambda: there.server.connections == 0, "ended with the certificate")


def test_a_channel_that_the_peer_ended_is_made_anew(far, near):
    there, here = far(), near()
    for _ in range(3):
        for _ in range(8):
            assert fetched(here, there.info) == file_of(1, 300_000)
        (control,) = here._control_channels._channels.values()
        socket.socket.shutdown(control.tls, socket.SHUT_RDWR)


def test_authorities_that_cannot_be_read_leave_the_ones_that_were_known(far, near):
    broken = [False]
    good = authority.TrustBundle(authority.derived(SECRET))

    def read():
        if broken[0]:
            raise ConfigError("damaged")
        return good

    here = near(authorities=read)
    broken[0] = True
    here.identity.refresh()
    assert here.status()["problem"] == "damaged"
    assert fetched(here, far().info)


@pytest.mark.parametrize("what", ["certificate", "key", "pair"])
def test_a_damaged_authority_is_an_error_that_says_so(what):
    one, other = fresh_authority(), fresh_authority()
    files = {"peer-ca.crt": one.pem.encode(), "peer-ca.key": key_pem(one)}
    if what == "certificate":
        files["peer-ca.crt"] = b"-----BEGIN CERTIFICATE-----\nnonsense"
    elif what == "key":
        files["peer-ca.key"] = b"nonsense"
    else:
        files["peer-ca.key"] = key_pem(other)
    with pytest.raises(ConfigError, match="peer-ca"):
        authority.read(lambda name: files.get(name, b""), SECRET)


def test_without_an_authority_in_the_secret_all_nodes_derive_the_same():
    one, two = (authority.read(lambda _: b"", SECRET).current for _ in range(2))
    assert one.certificate.public_key() == two.certificate.public_key()
    assert one.certificate.public_key() != authority.derived(b"another").certificate.public_key()
