"""A block's file, through its descriptor."""

from __future__ import annotations

import fcntl
import os
import signal

import pytest

from kvpool.errors import RefusedError
from kvpool_sidecar.blocks import file as blockfile
from kvpool_testing.blocks import header, payload


def test_a_lease_on_the_file_never_delays_who_fills_in_the_checksum(tmp_path):
    """Opening it for writing would wait for as long as its holder may keep the lease: 45 s by default."""
    data = payload(1)
    path = tmp_path / "block"
    path.write_bytes(bytes(4096) + data)
    reader, holder = os.open(path, os.O_RDONLY), os.open(path, os.O_RDONLY)
    try:
        fcntl.fcntl(holder, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(holder, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        with pytest.raises(RefusedError):
            blockfile.fill_checksum(reader, header(1, data))
        fcntl.fcntl(holder, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        filled = blockfile.fill_checksum(reader, header(1, data))
        assert filled.payload_sum == blockfile.payload_checksum(reader, len(data))
    finally:
        os.close(reader)
        os.close(holder)
