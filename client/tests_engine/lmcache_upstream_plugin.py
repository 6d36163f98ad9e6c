"""Plug-in of pytest: LMCache's own tests, with the pool's L2 adapter in place of LMCache's mock and file system ones.

The tests use keys and objects that LMCache never makes (hashes of 4 and 8 bytes, objects without the shapes of KV),
which the adapter refuses; they are admitted here. Each adapter has a tag of its own: the tests expect an empty store.
"""

from __future__ import annotations

import json
import os
import secrets
from typing import Any

import lmcache.v1.distributed.l2_adapters.fs_l2_adapter as fs
import lmcache.v1.distributed.l2_adapters.mock_l2_adapter as mock

from kvpool.engines.lmcache import fingerprint, l2_adapter

SETTINGS = json.loads(os.environ["KVPOOL_TEST_SETTINGS"])
fingerprint.MIN_HASH_BYTES = 4
l2_adapter.layout_of = lambda shapes, dtypes: "any"
l2_adapter.layout_of_object = lambda memory: "any"


class PoolInstead(l2_adapter.PoolL2Adapter):
    def __init__(self, config: Any = None) -> None:
        capacity = int(getattr(config, "max_size_gb", 0) * (1 << 30))
        super().__init__({**SETTINGS, "tag": secrets.token_hex(8), "max_capacity_bytes": capacity})


mock.MockL2Adapter = fs.FSL2Adapter = PoolInstead
