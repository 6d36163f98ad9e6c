"""vLLM's own tests of its tiers, from its source archive: fetched once, pinned by hash, kept in the cache.

pip downloads the archive, checks its hash and unpacks it; no code of it runs, because the build backend that pip would
start is not there. Only the tests of the tiers are kept.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from en_overlay import cache_root

PINS = Path(__file__).parent / "upstream"
KEPT = "tests/v1/kv_offload"
MAX_FILES, MAX_BYTES = 200, 8 << 20


def upstream_tests(version: str) -> Path:
    """A directory with `tests/v1/kv_offload` of vLLM `version`, as "0.33". CalledProcessError if it cannot be had."""
    pin = PINS / f"vllm-{version}.txt"
    home = cache_root() / f"vllm-tests-{hashlib.sha256(pin.read_bytes()).hexdigest()[:12]}"
    home.mkdir(parents=True, exist_ok=True)
    with (home / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (home / "ready").exists():
            print(f"upstream: fetching vLLM {version}'s tests into {home}", file=sys.stderr, flush=True)
            shutil.rmtree(home / "tests", ignore_errors=True)
            with tempfile.TemporaryDirectory(dir=home) as aside:
                keep(download(pin, Path(aside)), home)
            (home / "ready").touch()
    return home


def download(pin: Path, aside: Path) -> Path:
    """The unpacked archive below `aside`."""
    backend = aside / "no-backend"
    backend.mkdir()
    (backend / "setuptools.py").write_text('raise ImportError("only the archive is wanted")\n')
    (aside / "tmp").mkdir()
    environment = {**os.environ, "PYTHONPATH": str(backend), "TMPDIR": str(aside / "tmp")}
    options = ["--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--no-clean", "--require-hashes"]
    command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", *options, "-r", str(pin)]
    done = subprocess.run(
        [*command, "-d", str(aside / "out")],
        env=environment, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    found = [path.parent for path in (aside / "tmp").glob("pip-*/*/PKG-INFO")]
    if len(found) != 1:
        raise subprocess.CalledProcessError(done.returncode, command, done.stdout, done.stderr)
    return found[0]


def keep(archive: Path, home: Path) -> None:
    """Copy the tests' Python files, which must be few and small."""
    files = [path for path in (archive / KEPT).rglob("*.py") if path.is_file() and not path.is_symlink()]
    if not files or len(files) > MAX_FILES or sum(path.stat().st_size for path in files) > MAX_BYTES:
        raise ValueError(f"{len(files)} files of {KEPT} are not what is expected")
    for path in files:
        target = home / path.relative_to(archive)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    for package in ("tests", "tests/v1"):
        (home / package / "__init__.py").touch()
