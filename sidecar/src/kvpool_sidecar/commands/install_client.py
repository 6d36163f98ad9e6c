"""`kvpool-sidecar install-client`: copy the client, its entry points, its start-up module and xxhash to an engine pod's
volume.

The init container runs this with the user of the pod. The directory appears completely or not at all, and a repeated
run with the same content changes nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import os
import secrets
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from kvpool.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["install_client"]

_STAMP = ".kvpool-client"
_METADATA = ("METADATA", "entry_points.txt", "WHEEL", "LICENSE", "licenses/LICENSE")
_SKIP = {"__pycache__"}


def install_client(target: str, extras: str) -> bool:
    """Install the client in `target`; return whether anything was written.

    `extras`: directory of unpacked xxhash wheels; may be missing. ConfigError if the client is not installed here,
    OSError if `target` cannot be written.
    """
    files = dict(_client_files())
    files.update(_xxhash_files(Path(extras)))
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(name.encode() + b"\0" + hashlib.sha256(files[name].read_bytes()).digest())
    stamp = digest.hexdigest()
    place = Path(target)
    with contextlib.suppress(OSError):
        if (place / _STAMP).read_text() == stamp:
            return False
    place.parent.mkdir(parents=True, exist_ok=True)
    staging = place.with_name(f".{place.name}.{secrets.token_hex(6)}")
    try:
        _write_all(staging, files, stamp)
        _put_in_place(staging, place)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return True


def _write_all(directory: Path, files: dict[str, Path], stamp: str) -> None:
    directory.mkdir(mode=0o755)
    for name, source in files.items():
        copy = directory / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, copy)
    (directory / _STAMP).write_text(stamp)
    for folder, _, names in os.walk(directory):  # regardless of the umask: the engine may run as another user
        os.chmod(folder, 0o755)  # noqa: S103
        for name in names:
            os.chmod(Path(folder, name), 0o644)


def _put_in_place(staging: Path, place: Path) -> None:
    old = place.with_name(f".{place.name}.old.{secrets.token_hex(6)}")
    with contextlib.suppress(FileNotFoundError):
        place.rename(old)
    staging.rename(place)
    if old.is_dir() and not old.is_symlink():
        shutil.rmtree(old, ignore_errors=True)
    else:
        old.unlink(missing_ok=True)


def _client_files() -> Iterator[tuple[str, Path]]:
    """Yield the path below the target and the source file."""
    spec = importlib.util.find_spec("kvpool")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError("the client (distribution kvpool) is not installed in this image")
    package = Path(spec.submodule_search_locations[0])
    yield from _tree(package, "kvpool")
    yield "sitecustomize.py", package / "engines/sitecustomize.py"  # Python runs it from PYTHONPATH
    distribution = importlib.metadata.distribution("kvpool")
    folder = f"kvpool-{distribution.version}.dist-info"
    for name in _METADATA:  # not RECORD, which has paths of this installation
        source = Path(str(distribution.locate_file(folder))) / name
        if source.is_file():
            yield f"{folder}/{name}", source


def _xxhash_files(extras: Path) -> Iterator[tuple[str, Path]]:
    """Yield one xxhash package for all interpreters: each loads the extension module with its own suffix."""
    packages = sorted(extras.glob("xxhash")) + sorted(extras.glob("*/xxhash")) if extras.is_dir() else []
    if not packages:  # at least for engines with this Python version
        spec = importlib.util.find_spec("xxhash")
        packages = [Path(spec.submodule_search_locations[0])] if spec and spec.submodule_search_locations else []
    for package in packages:
        yield from _tree(package, "xxhash")
        for info in sorted(package.parent.glob("xxhash-*.dist-info")):
            for name in ("METADATA", "LICENSE", "licenses/LICENSE"):
                if (info / name).is_file():
                    yield f"{info.name}/{name}", info / name


def _tree(root: Path, prefix: str) -> Iterator[tuple[str, Path]]:
    for source in sorted(root.rglob("*")):
        relative = source.relative_to(root)
        if source.is_file() and not _SKIP & set(relative.parts) and source.suffix != ".pyc":
            yield f"{prefix}/{relative.as_posix()}", source
