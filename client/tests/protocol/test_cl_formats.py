"""Names, block header and configuration against golden files, which other parts and other versions also read."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool import config
from kvpool.errors import ConfigError, CorruptBlockError
from kvpool.protocol import block, keys

GOLDEN = Path(__file__).parents[1] / "golden"
VECTORS: dict[str, list[dict[str, Any]]] = json.loads((GOLDEN / "keys.json").read_text())
HEADER: dict[str, Any] = json.loads((GOLDEN / "header.json").read_text())
PAYLOAD = bytes(range(256)) * 32


def unhex(*texts: str) -> list[bytes]:
    return [bytes.fromhex(t) for t in texts]


@pytest.mark.parametrize("v", VECTORS["fingerprint"])
def test_fingerprint(v: dict[str, Any]) -> None:
    assert keys.fingerprint(v["inputs"]).hex() == v["hex"]


@pytest.mark.parametrize("v", VECTORS["block_id"])
def test_ident(v: dict[str, Any]) -> None:
    assert keys.block_id(*unhex(v["fingerprint"], v["block_hash"], v["part"])).hex() == v["hex"]


@pytest.mark.parametrize("v", VECTORS["key"])
def test_key(v: dict[str, Any]) -> None:
    secret, block_id = unhex(v["pool_secret"], v["block_id"])
    assert keys.block_key(secret, v["tenant"], block_id).hex() == v["hex"]


@pytest.mark.parametrize("v", VECTORS["tenant_tag"])
def test_tenant_tag(v: dict[str, Any]) -> None:
    assert keys.tenant_tag(bytes.fromhex(v["pool_secret"]), v["tenant"]).hex() == v["hex"]


@pytest.mark.parametrize("v", VECTORS["salt_key"])
def test_salt_key(v: dict[str, Any]) -> None:
    assert keys.salt_key(*unhex(v["pool_secret"], v["tenant_tag"])).hex() == v["hex"]


@pytest.mark.parametrize("v", VECTORS["salt_tag"])
def test_salt_tag(v: dict[str, Any]) -> None:
    assert keys.salt_digest(v["salt"]).hex() == v["digest"]
    assert keys.salt_tag(*unhex(v["salt_key"], v["digest"])).hex() == v["hex"]


def test_a_salt_has_another_tag_in_another_tenant_and_another_pool() -> None:
    digest = keys.salt_digest("salt")
    secrets, tenants = (b"s" * 32, b"t" * 32), (b"a" * 16, b"b" * 16)
    tags = {keys.salt_tag(keys.salt_key(secret, tenant), digest) for secret in secrets for tenant in tenants}
    assert len(tags) == 4
    assert len(keys.salt_digest("\ud800")) == 32  # half a surrogate pair, as JSON may hold one


@pytest.mark.parametrize("v", VECTORS["peer_secret"])
def test_peer_secret(v: dict[str, Any]) -> None:
    assert keys.peer_secret(bytes.fromhex(v["pool_secret"]), v["pool_uid"]).hex() == v["hex"]


@given(st.binary(max_size=40), st.binary(max_size=40), st.binary(max_size=8), st.integers(1, 40))
def test_bytes_moved_between_fields_give_another_ident(a: bytes, b: bytes, c: bytes, n: int) -> None:
    if b[:n]:
        assert keys.block_id(a, b, c) != keys.block_id(a + b[:n], b[n:], c)
        assert keys.block_id(a, b, c) != keys.block_id(a, b[n:], c + b[:n])


def test_fingerprint_refuses_what_json_cannot_say() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        keys.fingerprint({"x": float("nan")})
    with pytest.raises(TypeError):
        keys.fingerprint({"x": b"bytes"})


def golden_header() -> block.BlockHeader:
    names = ("block_key", "block_id", "fingerprint", "tenant_tag", "payload_sum")
    return block.BlockHeader(
        payload_len=HEADER["payload_len"],
        created_ms=HEADER["created_ms"],
        **{n: bytes.fromhex(HEADER[n]) for n in names},
    )


def sum_of(data: Any, h: block.BlockHeader) -> bytes:
    return block.payload_sum_of(data, h.block_key, h.block_id, h.fingerprint, h.tenant_tag, h.payload_len)


def test_the_short_way_to_check_a_header_gives_what_the_long_way_does() -> None:
    encoded = block.encode_header(golden_header())
    for kind in (bytes, bytearray, memoryview):
        assert sum_of(kind(encoded), golden_header()) == block.decode_header(kind(encoded)).payload_sum


def test_header_golden() -> None:
    encoded = block.encode_header(golden_header())
    assert len(encoded) == block.HEADER_BYTES
    assert encoded[:168].hex() == HEADER["head"]
    assert not any(encoded[168:-16])
    assert encoded[-16:].hex() == HEADER["header_sum"]
    assert block.decode_header(encoded) == golden_header()


NAMED = block.EngineBlock(b"h" * 32, b"p" * 8, b"\0\0\0\1", 256, 1)


def named_header() -> block.BlockHeader:
    return replace(golden_header(), engine_block=NAMED)


def test_a_header_with_the_name_of_its_engine_golden() -> None:
    encoded = block.encode_header(named_header())
    assert len(encoded) == block.HEADER_BYTES
    assert encoded[:168].hex() == HEADER["head"].replace("4b56504f4f4c42310100", "4b56504f4f4c42310200")
    assert encoded[168:260].hex() == HEADER["name"]
    assert not any(encoded[260:-16])
    assert encoded[-16:].hex() == HEADER["named_header_sum"]
    assert block.decode_header(encoded) == named_header()
    assert sum_of(encoded, named_header()) == golden_header().payload_sum


@pytest.mark.parametrize("bit", range(0, block.HEADER_BYTES * 8, 97))
def test_any_flipped_bit_of_a_header_with_a_name_is_noticed(bit: int) -> None:
    encoded = bytearray(block.encode_header(named_header()))
    encoded[bit // 8] ^= 1 << bit % 8
    with pytest.raises(CorruptBlockError, match="fails its checksum"):
        block.decode_header(encoded)
    with pytest.raises(CorruptBlockError, match="fails its checksum"):
        sum_of(encoded, named_header())


@pytest.mark.parametrize(
    ("offset", "value"),
    [(168, b"\0"), (168, b"\37"), (168, b"\41"), (169, b"\377"), (169, b"\7"), (170, b"\21"), (170, b"\3")],
)
def test_a_malformed_name_is_refused_though_its_checksum_holds(offset: int, value: bytes) -> None:
    import hashlib

    body = bytearray(block.encode_header(named_header())[:-16])
    body[offset : offset + len(value)] = value
    forged = bytes(body) + hashlib.blake2b(body[:260], digest_size=16).digest()
    with pytest.raises(CorruptBlockError, match="engine block identity"):
        block.decode_header(forged)


SALT_TAG = bytes.fromhex(HEADER["salt_tag"])
SALTED = {
    "without a name": (golden_header(), bytes(92).hex(), HEADER["salted_header_sum"]),
    "with a name": (named_header(), HEADER["name"], HEADER["named_salted_header_sum"]),
}


@pytest.mark.parametrize("kind", SALTED)
def test_a_header_with_the_tag_of_a_salt_golden(kind: str) -> None:
    plain, name, header_sum = SALTED[kind]
    salted = replace(plain, salt_tag=SALT_TAG)
    encoded = block.encode_header(salted)
    assert len(encoded) == block.HEADER_BYTES
    assert encoded[:168].hex() == HEADER["head"].replace("4b56504f4f4c42310100", "4b56504f4f4c42310300")
    assert (encoded[168:260].hex(), encoded[260:276]) == (name, SALT_TAG)
    assert not any(encoded[276:-16])
    assert encoded[-16:].hex() == header_sum
    for as_kind in (bytes, bytearray, memoryview):
        assert block.decode_header(as_kind(encoded)) == salted
        assert sum_of(as_kind(encoded), salted) == plain.payload_sum


@given(
    st.one_of(st.none(), st.builds(block.EngineBlock, st.binary(min_size=1, max_size=32), st.binary(max_size=32))),
    st.one_of(st.just(block.NO_SALT), st.binary(min_size=16, max_size=16)),
    st.sampled_from([block.CODEC_NONE, block.CODEC_LZ4]),
)
def test_any_header_is_read_as_it_was_written(name: block.EngineBlock | None, salt_tag: bytes, codec: int) -> None:
    stored = HEADER["payload_len"] - (codec != block.CODEC_NONE)
    header = replace(golden_header(), engine_block=name, salt_tag=salt_tag, codec=codec, stored_len=stored)
    encoded = block.encode_header(header)
    assert block.decode_header(encoded, packed=True) == header
    assert encoded[8] == (3 if any(salt_tag) else 1 if name is None else 2)


@pytest.mark.parametrize("kind", SALTED)
@pytest.mark.parametrize("bit", range(0, block.HEADER_BYTES * 8, 193))
def test_any_flipped_bit_of_a_header_with_a_salt_is_noticed(kind: str, bit: int) -> None:
    header = replace(SALTED[kind][0], salt_tag=SALT_TAG)
    encoded = bytearray(block.encode_header(header))
    encoded[bit // 8] ^= 1 << bit % 8
    with pytest.raises(CorruptBlockError, match="fails its checksum"):
        block.decode_header(encoded)
    with pytest.raises(CorruptBlockError, match="fails its checksum"):
        sum_of(encoded, header)


@pytest.mark.parametrize(
    ("kind", "offset", "value", "what"),
    [
        ("without a name", 260, bytes(16), "empty salt tag"),
        ("without a name", 172, b"\1", "engine block identity"),
        ("without a name", 180, b"h", "engine block identity"),
        ("with a name", 168, b"\0", "engine block identity"),
        ("with a name", 169, b"\7", "engine block identity"),
    ],
)
def test_a_malformed_header_with_a_salt_is_refused_though_its_checksum_holds(
    kind: str, offset: int, value: bytes, what: str
) -> None:
    import hashlib

    body = bytearray(block.encode_header(replace(SALTED[kind][0], salt_tag=SALT_TAG))[:-16])
    body[offset : offset + len(value)] = value
    with pytest.raises(CorruptBlockError, match=what):
        block.decode_header(bytes(body) + hashlib.blake2b(body[:276], digest_size=16).digest())


def test_a_salt_tag_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="16 bytes"):
        block.encode_header(replace(golden_header(), salt_tag=b"short"))


@pytest.mark.parametrize(
    "wrong",
    [{"engine_hash": b""}, {"engine_hash": b"h" * 33}, {"parent_hash": b"p" * 33}, {"part": b"x" * 17}, {"tokens": -1}],
)
def test_a_name_that_no_header_can_hold_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"bytes|bits"):
        block.EngineBlock(**{"engine_hash": b"h", **wrong})


def test_the_token_of_routers() -> None:
    token = keys.events_token(b"s" * 32, "uid", 0)
    assert token == "0b7aadbf22f26ff0972447662f6429400d5868ffc1c6fc7e04cab3ef6f3d5f15"
    assert len({token, keys.events_token(b"s" * 32, "uid", 1), keys.events_token(b"s" * 32, "u", 0)}) == 3


def test_payload_checksum_golden_whole_and_in_steps() -> None:
    assert block.checksum(PAYLOAD).hex() == HEADER["payload_sum"]
    running = block.running_checksum()
    for start in range(0, len(PAYLOAD), 777):
        running.update(memoryview(PAYLOAD)[start : start + 777])
    assert running.digest().hex() == HEADER["payload_sum"]


@given(st.integers(0, block.HEADER_BYTES * 8 - 1))
def test_any_flipped_bit_of_a_header_is_noticed(bit: int) -> None:
    encoded = bytearray(block.encode_header(golden_header()))
    encoded[bit // 8] ^= 1 << bit % 8
    with pytest.raises(CorruptBlockError, match="fails its checksum"):
        block.decode_header(encoded)
    with pytest.raises(CorruptBlockError, match="fails its checksum"):
        sum_of(encoded, golden_header())


@pytest.mark.parametrize("size", [0, 1, 168, 4080, 4095, 4097])
def test_a_header_of_another_size_is_refused(size: int) -> None:
    encoded = (block.encode_header(golden_header()) + b"x")[:size]
    with pytest.raises(CorruptBlockError, match="truncated"):
        block.decode_header(encoded)
    with pytest.raises(CorruptBlockError, match="truncated"):
        sum_of(encoded, golden_header())


@pytest.mark.parametrize(
    ("offset", "value"),
    [(0, b"KVPOOLB2"), (8, b"\5\0"), (8, b"\1\1"), (10, b"\1"), (11, b"\2"), (12, b"\1\0\0\0"), (24, bytes(8))],
)
def test_a_header_of_another_kind_is_refused_though_its_checksum_holds(offset: int, value: bytes) -> None:
    body = bytearray(block.encode_header(golden_header())[:-16])
    body[offset : offset + len(value)] = value
    import hashlib

    whole = body + hashlib.blake2b(body[:168], digest_size=16).digest()
    with pytest.raises(CorruptBlockError, match=r"not a block of format|cannot read"):
        block.decode_header(whole)
    with pytest.raises(CorruptBlockError, match=r"not a block of format|cannot read"):
        sum_of(whole, golden_header())


@pytest.mark.parametrize("field", ["block_key", "block_id", "fingerprint", "tenant_tag", "payload_len"])
def test_require_names_the_field_that_differs(field: str) -> None:
    header = golden_header()
    other: Any = 1 if field == "payload_len" else bytes(len(getattr(header, field)))
    block.require(header, **{field: getattr(header, field)})
    with pytest.raises(CorruptBlockError, match=field.replace("_", " ").replace(" len", " length")):
        block.require(header, **{field: other})
    with pytest.raises(CorruptBlockError, match=field.replace("_", " ").replace(" len", " length")):
        sum_of(block.encode_header(header), replace(header, **{field: other}))


def test_require_looks_at_the_payload_last() -> None:
    with pytest.raises(CorruptBlockError, match="another block key"):
        block.require(golden_header(), block_key=bytes(32), payload_sum=lambda: pytest.fail("read for nothing"))
    with pytest.raises(CorruptBlockError, match="payload fails"):
        block.require(golden_header(), payload_sum=lambda: bytes(16))


@pytest.mark.parametrize(("kind", "name"), [(config.PoolConfig, "pool"), (config.ClientConfig, "client")])
def test_config_golden(kind: Any, name: str) -> None:
    text = (GOLDEN / f"{name}.json").read_text()
    assert config.dumps(config.loads(kind, text)) == text


def test_config_ignores_what_a_newer_writer_added() -> None:
    value = json.loads((GOLDEN / "pool.json").read_text())
    value["new"] = {"x": 1}
    value["local"][0]["new"] = 1
    assert config.loads(config.PoolConfig, json.dumps(value)).local[0].name == "nvme"


def test_config_fills_in_defaults() -> None:
    assert config.loads(config.ClientConfig, "{}") == config.ClientConfig()


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"pool": None}, "PoolConfig.pool"),
        ({"local": []}, "local"),
        ({"local": {}}, "local"),
        ({"local": [{"name": "a", "path": "/x"}]}, r"local\[0\].capacity_bytes"),
        ({"http_port": "80"}, "http_port"),
        ({"http_port": True}, "http_port"),
        ({"cache": {"low_watermark": 90}}, "watermark"),
        ({"cache": {"write_policy": "Never"}}, "write_policy"),
        ({"cache": {"compression": "Gzip"}}, "compression"),
        ({"shared": {"name": "nfs", "path": "/x", "sweep_lease_s": 0}}, "sweep_lease_s"),
        ({"shared": None, "fsspec": {"name": "s3", "url": "s3://b/p", "sweep_every_s": 0}}, "sweep_every_s"),
        ({"version": 2}, "version"),
    ],
)
def test_config_errors_name_the_field(change: dict[str, Any], names: str) -> None:
    value = {**json.loads((GOLDEN / "pool.json").read_text()), **change}
    with pytest.raises(ConfigError, match=names):
        config.loads(config.PoolConfig, json.dumps(value), where="pool.json")


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from([f.name for f in dataclasses.fields(config.PoolConfig)]), inner, max_size=9
            )
        ),
        max_leaves=20,
    )
)
def test_any_json_is_a_config_or_a_config_error(value: Any) -> None:
    try:
        config.loads(config.PoolConfig, json.dumps(value))
    except ConfigError:
        pass
    else:
        pytest.fail("that cannot have been a whole PoolConfig")
