"""Purge by salt: which blocks fit, and that the tag of a salt survives every way a block can take. Real sidecars."""

from __future__ import annotations

import pytest
from sc_nodes import MIB, wait_for
from sc_operator import ADMIN_PORT, Operator
from sc_raw import FINGERPRINT, SECRET, block_id, payload

from kvpool import config
from kvpool.errors import ProtocolError
from kvpool.protocol import block, keys
from kvpool.protocol.block import HEADER_BYTES
from kvpool_sidecar.admin.purge_filter import PurgeFilter
from kvpool_sidecar.storage.tombstones import PurgeTombstones
from kvpool_testing.blocks import key

SIZE = 16 * 1024
LOCAL, SHARED = {"tier": "Local"}, {"tier": "Shared"}


def digest(salt: str) -> str:
    return keys.salt_digest(salt).hex()


def tag_of(salt: str, tenant: str = "team-a") -> bytes:
    return keys.salt_tag(keys.salt_key(SECRET, keys.tenant_tag(SECRET, tenant)), keys.salt_digest(salt))


def blocks(first: int, count: int = 2) -> dict[bytes, bytes]:
    return {block_id(n): payload(n, SIZE) for n in range(first, first + count)}


def headers(files) -> dict[bytes, block.BlockHeader]:
    """By block id."""
    found = [block.decode_header(file.read_bytes()[:HEADER_BYTES], packed=True) for file in files]
    return {header.block_id: header for header in found}


# -- which blocks


def made(**changes) -> block.BlockHeader:
    fields = {"tenant_tag": keys.tenant_tag(SECRET, "team-a"), "created_ms": 1000, "salt_tag": tag_of("red")}
    return block.BlockHeader(key(1), bytes(32), FINGERPRINT, payload_len=1, payload_sum=bytes(16), **fields | changes)


@pytest.mark.parametrize(
    ("params", "fits"),
    [
        ({"salts": [digest("red")]}, True),
        ({"salts": [digest("blue")]}, False),
        ({"salts": [digest("blue"), digest("red")]}, True),
        ({"salts": [digest("red")], "tenant": "team-a"}, True),
        ({"salts": [digest("red")], "tenant": "team-b"}, False),
        ({"salts": [digest("red")], "fingerprint": FINGERPRINT.hex()[:8]}, True),
        ({"salts": [digest("red")], "fingerprint": "0" * 8}, False),
        ({"salts": [digest("red")], "made_before_ms": 1001}, True),
        ({"salts": [digest("red")], "made_before_ms": 1000}, False),
        ({"salts": [digest(str(n)) for n in range(63)] + [digest("red")]}, True),
    ],
)
def test_a_salt_and_all_else_that_is_given_must_fit(params, fits):
    wish = PurgeFilter.parse(params, SECRET)
    assert not wish.is_everything
    assert wish.matches(made()) is fits
    assert not wish.matches(made(salt_tag=block.NO_SALT))


def test_a_salt_is_found_in_whichever_tenant_and_a_tag_of_one_means_nothing_in_another():
    other = keys.tenant_tag(SECRET, "team-b")
    wish = PurgeFilter.parse({"salts": [digest("red")]}, SECRET)
    assert wish.matches(made(tenant_tag=other, salt_tag=tag_of("red", "team-b")))
    assert not wish.matches(made(tenant_tag=other, salt_tag=tag_of("red")))
    assert not PurgeFilter.parse({"salts": [digest("red")]}, b"the secret of another pool, long enough").matches(made())


@pytest.mark.parametrize(
    "salts",
    [[], "", digest("red"), {}, 7, [7], ["red"], [digest("red")[:63]], [digest("red").upper()], [digest("red")] * 65],
)
def test_salts_that_are_not_digests_remove_nothing(salts):
    with pytest.raises(ProtocolError, match="salt"):
        PurgeFilter.parse({"salts": salts}, SECRET)
    with pytest.raises(ProtocolError):
        PurgeFilter.parse({"salts": [digest("red")], "all": True}, SECRET)


def test_a_copy_of_a_purged_salt_is_refused_and_others_are_not():
    bars = PurgeTombstones()
    bars.add(PurgeFilter.parse({"salts": [digest("red")]}, SECRET).matches, 2000)
    assert bars.rejects(made())
    assert not bars.rejects(made(created_ms=2000))  # stored since
    assert not bars.rejects(made(salt_tag=tag_of("blue")))
    assert not bars.rejects(made(salt_tag=block.NO_SALT))


# -- real sidecars


def test_a_salt_is_purged_from_every_tier_and_everybody_else_keeps_theirs(cluster):
    """Drives, copies that another node made, and a shared directory with compression, which writes headers again."""
    c = cluster(shared=True)
    cache = config.CacheConfig(compression="Zstd", warm_up_bytes_per_s=64 * MIB)
    a, b = (c.node(name, admin_port=ADMIN_PORT, salt_tags=True, cache=cache) for name in "ab")
    red, blue, plain, theirs = blocks(0), blocks(10), blocks(20), blocks(30)
    with a.connect("team-a") as one, a.connect("team-b") as two:
        one.put(red, "red")
        one.put(blue, "blue", fill=True)
        one.put(plain)
        two.put(theirs, "red")
        one.lookup([*red, *blue])
    expected = {**dict.fromkeys(red, tag_of("red")), **dict.fromkeys(blue, tag_of("blue"))}
    expected |= {**dict.fromkeys(plain, block.NO_SALT), **dict.fromkeys(theirs, tag_of("red", "team-b"))}
    wait_for(lambda: a.status()["shared"]["copies"].get("copied") == 8, "all are on the shared tier")
    shared = [file for file in (c.shared / "blocks").rglob("*") if file.is_file()]
    reported = headers(shared)
    assert {name: header.salt_tag for name, header in reported.items()} == expected
    assert all(header.codec == block.CODEC_ZSTD for header in reported.values())
    on_a = headers(a.files())
    assert {name: header.salt_tag for name, header in on_a.items()} == expected
    assert all(on_a[name].payload_sum == block.checksum(data) for name, data in blue.items())
    a.wait_announced()
    Operator.of(b).run("w-1", "warm", bytes_per_s=1 << 30)
    wait_for(lambda: set(red) <= headers(b.files()).keys(), "the other node has copies")
    assert {name: header.salt_tag for name, header in headers(b.files()).items()}.items() <= expected.items()

    wish = {"tenant": "team-a", "salts": [digest("red")]}
    for node, count in ((a, 2), (b, 2)):
        done = Operator.of(node).run("p-1", "purge", **wish, **LOCAL)
        assert (done["state"], done["counts"]["blocks"]) == ("Succeeded", count), done
    assert Operator.of(a).run("p-2", "purge", **wish, **SHARED)["counts"]["blocks"] == 2
    for node in (a, b):
        with node.connect("team-a") as one, node.connect("team-b") as two:
            wait_for(lambda one=one: not any(one.lookup(list(red))), "the index has forgotten them")
            assert one.get(list(red)) == [None] * 2
            assert one.get([*blue, *plain]) == [*blue.values(), *plain.values()]
            assert two.get(list(theirs)) == list(theirs.values())
    # without a tenant: the salt of any tenant; a block that is stored again stays
    with a.connect("team-a") as one:
        one.put(red, "red")
    assert Operator.of(a).run("p-3", "purge", salts=[digest("red"), digest("green")], **LOCAL)["counts"]["blocks"] == 4
    assert set(headers(a.files())) == {*blue, *plain}


def test_a_salt_is_purged_from_an_object_store(tmp_path, cluster):
    bucket = tmp_path / "bucket"
    bucket.mkdir()
    tier = config.FsspecTier("cold", f"file://{bucket}/p")
    a = cluster(index=False).node("a", admin_port=ADMIN_PORT, fsspec=tier, salt_tags=True)
    red, blue, plain = blocks(0), blocks(10), blocks(20)
    with a.connect("team-a") as one:
        one.put(red, "red")
        one.put(blue, "blue")
        one.put(plain)
    wait_for(lambda: a.status()["shared"]["copies"].get("copied") == 6, "all are in the object store")
    operator = Operator.of(a)
    done = operator.run("p-1", "purge", salts=[digest("red")], **SHARED)
    assert (done["state"], done["counts"]["blocks"]) == ("Succeeded", 2), done
    assert operator.run("p-2", "purge", all=True, **LOCAL)["counts"]["blocks"] == 6
    with a.connect("team-a") as one:
        assert one.get([*red, *blue, *plain]) == [None, None, *blue.values(), *plain.values()]
    assert operator.run("p-3", "purge", salts=[digest("blue")], **SHARED)["counts"]["blocks"] == 2


def test_a_client_is_told_the_key_of_its_tenant_where_the_pool_tags_salts(cluster):
    c = cluster(index=False)
    off, on = c.node("off"), c.node("on", salt_tags=True)
    with off.connect("team-a") as one:
        assert one.server.salt_key == b""
    with on.connect("team-a") as one, on.connect("team-a") as same, on.connect("team-b") as two:
        assert one.server.salt_key == same.server.salt_key == keys.salt_key(SECRET, one.server.tenant_tag)
        assert two.server.salt_key != one.server.salt_key
