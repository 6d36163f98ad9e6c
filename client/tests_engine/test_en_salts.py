"""Blocks of a real vLLM that are purged by the salt of their requests: those are gone, all others are hits."""

from __future__ import annotations

import hashlib
import sys
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from cl_nodes import Cluster, until
from en_engine import ROOT, Engine, connector

from kvpool.protocol import block, keys

sys.path.append(str(ROOT / "sidecar" / "tests"))
from sc_operator import Operator  # orders to sidecars, by hand

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cl_nodes import Node

BLOCK = 32  # tokens, see engine_process.py
PATIENT = {"deadlines": {"lookup_ms": 500, "load_min_ms": 2000}}
PROMPT = [3 + (i * i * 31 + i) % 500 for i in range(9 * BLOCK + 9)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    found = Cluster(tmp_path_factory.mktemp("salts"), ("a", "b"), salt_tags=True, takes_orders=True)
    yield found
    found.close()


@pytest.fixture(scope="module")
def engines(cluster: Cluster, start_engine: Callable[..., Engine]) -> tuple[Engine, Engine]:
    a, b = (start_engine(connector(cluster[name].socket, **PATIENT)) for name in "ab")
    return a, b


def tags_on(node: Node) -> Counter[bytes]:
    headers = [block.decode_header(f.read_bytes()[: block.HEADER_BYTES]) for f in node.block_files()]
    return Counter(header.salt_tag for header in headers)


def test_a_purged_salt_is_computed_again_and_other_salts_of_the_same_prompt_are_hits(
    cluster: Cluster, engines: tuple[Engine, Engine]
) -> None:
    a, b = engines
    salts = ["red", "blue", ""]
    first = [a.generate(PROMPT, salt=salt) for salt in salts]
    a.settle()
    assert until(lambda: cluster["a"].announced() >= 27)
    assert [answer["cached"] for answer in first] == [0, 0, 0]
    secret = (cluster.secret / "pool-secret").read_text().encode()
    salt_key = keys.salt_key(secret, keys.tenant_tag(secret, "team"))
    red, blue = (keys.salt_tag(salt_key, keys.salt_digest(salt)) for salt in ("red", "blue"))
    assert tags_on(cluster["a"]) == {red: 9, blue: 9, block.NO_SALT: 9}

    for name, count in (("a", 9), ("b", 0)):
        node = cluster[name]
        operator = Operator.of_pool("127.0.0.1", name, node.pool.admin_port, node.pool.uid, secret)
        done = operator.run("p-1", "purge", tier="Local", salts=[hashlib.sha256(b"red").hexdigest()])
        assert (done["state"], done["counts"]["blocks"]) == ("Succeeded", count), done
    assert tags_on(cluster["a"]) == {blue: 9, block.NO_SALT: 9}

    assert until(lambda: b.stats()["connected"])
    second = [b.generate(PROMPT, salt=salt) for salt in salts]  # its node has none of them, its memory neither
    assert [answer["cached"] for answer in second] == [0, 9 * BLOCK, 9 * BLOCK]
    assert len({tuple(answer["tokens"]) for answer in first + second}) == 1
    b.settle()
    assert until(lambda: tags_on(cluster["b"])[red] == 9)  # computed since: it is stored, and may be purged, again
