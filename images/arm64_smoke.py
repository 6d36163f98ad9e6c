"""Runs on the emulated machine of arm64-check.sh: all modules, ciphers, codecs and the index server."""

from __future__ import annotations

import importlib
import os
import pkgutil
import platform
import re
import subprocess
import sys

PACKAGES = ("kvpool", "kvpool_sidecar", "kvpool_operator")
FOREIGN = {"vllm", "lmcache", "sglang", "torch", "pytest", "nixl"}
"""What an engine or a test brings: a module that needs one of these is not of the images."""


def import_all() -> int:
    """Number of imported modules; ImportError for one that lacks what the images install."""
    count = 0
    for name in PACKAGES:
        package = importlib.import_module(name)
        for found in pkgutil.walk_packages(package.__path__, f"{name}."):
            if found.name.endswith("__main__"):
                continue
            try:
                importlib.import_module(found.name)
            except ImportError as e:
                if (
                    not {
                        (cause.name or "").partition(".")[0]
                        for cause in (e, e.__cause__)
                        if isinstance(cause, ImportError)
                    }
                    & FOREIGN
                ):
                    raise
            else:
                count += 1
    return count


def round_trips() -> None:
    """Compiled ciphers, codecs and digests give back what they got."""
    import lz4.frame
    import msgspec
    import xxhash
    import zmq
    import zstandard
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    data = os.urandom(1 << 20)
    cipher, nonce = AESGCM(bytes(32)), bytes(12)
    assert cipher.decrypt(nonce, cipher.encrypt(nonce, data, b""), b"") == data  # noqa: S101
    assert zstandard.decompress(zstandard.compress(data)) == data  # noqa: S101
    assert lz4.frame.decompress(lz4.frame.compress(data)) == data  # noqa: S101
    assert msgspec.msgpack.decode(msgspec.msgpack.encode([data])) == [data]  # noqa: S101
    assert xxhash.xxh3_128(b"").hexdigest() == "99aa06d3014798d86001c324468d497f"  # noqa: S101
    assert zmq.has("curve")  # noqa: S101


def index_server() -> str:
    """Version of the index server, which has also answered."""
    from kvpool_sidecar.index.redis_server import server_binary, server_version

    binary = server_binary()
    done = subprocess.run([binary, "--check-system"], capture_output=True, text=True, timeout=60, check=False)  # noqa: S603
    assert re.search(r"overcommit|clocksource|\[", done.stdout + done.stderr), done  # noqa: S101
    return str(server_version(binary))


assert platform.machine() == "aarch64", platform.machine()  # noqa: S101
count = import_all()
round_trips()
print(f"arm64-check: {count} modules on Python {sys.version.split()[0]}; {index_server()}")
