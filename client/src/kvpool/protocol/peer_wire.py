"""Wire protocol between sidecars. docs/contribute/design/protocol.md explains the reasons.

A control connection is TLS with certificates of both sides and issues tickets. A ticket opens a data connection over
TCP, on which both sides prove that they have it. Then follow fixed-size requests, each with a MAC; the answer is
PEER_RESPONSE and then the block file (header and payload) by sendfile.

The requesting side forwards the answers to its client (wire.Op.OPEN) over a stream: a SOCK_STREAM connection to the
path of the client's socket with STREAM_SUFFIX. For each STREAM_DIAL entry the client dials one, sends the entry's token
of STREAM_TOKEN_BYTES, and reads the answers of this stream's entries in order into the engine's buffer. A client
announces `dials_streams` in HELLO, otherwise it gets no such entry. Older sidecars hand over a connected descriptor
instead (STREAM_NEW_CONN), after those of the files. No socket of a sidecar ever reaches a client, and a connection
between sidecars serves one client connection only.

A joining node requests by HOTTEST which blocks to copy first (kvpool_sidecar.peers.hottest). A leaving node requests
by HEADROOM what its peers can take, and by RECEIVE that they copy a block (kvpool_sidecar.peers.migration).

Everything here is pure packing and unpacking. Thread-safe.
"""

from __future__ import annotations

import enum
import hmac
import struct

__all__ = [
    "MAX_TICKETS",
    "PEER_ADDRESS",
    "PEER_CLIENT",
    "PEER_MAC_BYTES",
    "PEER_MAGIC",
    "PEER_NONCE_BYTES",
    "PEER_REQUEST",
    "PEER_RESPONSE",
    "PEER_STAGED",
    "PEER_TICKETS",
    "PEER_TICKET_BYTES",
    "PEER_TLS",
    "PEER_TOKEN",
    "STREAM_SUFFIX",
    "STREAM_TOKEN_BYTES",
    "PeerKind",
    "PeerStatus",
    "pack_peer_address",
    "peer_client_proof",
    "peer_request_mac",
    "peer_server_proof",
    "peer_session_key",
    "unpack_peer_address",
]

# s -> c: PEER_MAGIC, nonce_s[32]. c -> s: PEER_CLIENT, or immediately TLS; the first byte distinguishes. In the clear:
# DATA: ticket and proof in PEER_CLIENT; s -> c: proof[32]; then requests.
# Inside TLS the requesting side sends PEER_TLS, after it has verified the certificate:
# CONTROL: each PEER_TICKETS is answered by PEER_ADDRESS, the address of the serving side's data listener, and the
# requested number of tickets (name[16], key[32]).
# TLS_DATA: c -> s: session key[32]; then requests.
PEER_MAGIC = b"KVPPEER3"  # version 2 had the data address from the index; the magic distinguishes its sidecars
PEER_NONCE_BYTES = 32
PEER_TICKET_BYTES = 16
PEER_CLIENT = struct.Struct("<B7x16s32s32s")  # PeerKind, name of the ticket, nonce_c, proof of the requesting side
PEER_TLS = struct.Struct("<B7x")  # PeerKind
PEER_ADDRESS = struct.Struct("<HB45s")  # port, length of the text, numeric IP address as text
PEER_TICKETS = struct.Struct("<4sI")  # magic, how many
MAX_TICKETS = 16


class PeerKind(enum.IntEnum):
    CONTROL = 1
    DATA = 2
    TLS_DATA = 3


PEER_REQUEST = struct.Struct("<4sBBHQ32s16s")  # magic, op (OPEN), flags, lane, sequence number, key, MAC
PEER_MAC_BYTES = 16
_MAX_HOST = 45  # the longest IPv6 address as text
STREAM_SUFFIX = ".stream"
STREAM_TOKEN_BYTES = 16
PEER_RESPONSE = struct.Struct("<4sBBHQ")  # magic, PeerStatus, 0, 0, bytes that follow: the block file, for OPEN
PEER_STAGED = struct.Struct("<QQQ")  # STAGE: address and bytes of the block file, token
PEER_TOKEN = struct.Struct("<Q24x")  # RELEASE: stands where other requests have the key


class PeerStatus(enum.IntEnum):
    MISS = 0
    OK = 1
    BUSY = 2  # STAGE: no free slot, request it by OPEN


def peer_client_proof(secret: bytes, nonce_s: bytes, nonce_c: bytes) -> bytes:
    """Proof that the requesting sidecar sends: HMAC-SHA-256(secret, "client" | nonce_s | nonce_c)."""
    return hmac.digest(secret, b"client" + nonce_s + nonce_c, "sha256")


def peer_server_proof(secret: bytes, nonce_s: bytes, nonce_c: bytes) -> bytes:
    """Proof that the serving sidecar sends in reply."""
    return hmac.digest(secret, b"server" + nonce_c + nonce_s, "sha256")


def peer_session_key(secret: bytes, nonce_s: bytes, nonce_c: bytes) -> bytes:
    """Derive the key of one connection's request MACs."""
    return hmac.digest(secret, b"session" + nonce_s + nonce_c, "sha256")


def peer_request_mac(session_key: bytes, request: bytes) -> bytes:
    """Compute the last 16 bytes of PEER_REQUEST over all bytes before them, against forgery and replay.

    The sequence number among them binds the request to its place on the connection.
    """
    return hmac.digest(session_key, b"request" + request[:-PEER_MAC_BYTES], "sha256")[:PEER_MAC_BYTES]


def pack_peer_address(host: str, port: int) -> bytes:
    """Pack the address of a data listener. ValueError if `host` is longer than a numeric IP address."""
    text = host.encode()
    if len(text) > _MAX_HOST:
        raise ValueError(f"an address of {len(text)} characters")
    return PEER_ADDRESS.pack(port, len(text), text)


def unpack_peer_address(data: bytes) -> tuple[str, int]:
    """Return host and port of PEER_ADDRESS. Bytes that are no text become replacement characters."""
    port, length, text = PEER_ADDRESS.unpack(data)
    return text[:length].decode("ascii", "replace"), port
