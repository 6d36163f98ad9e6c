"""Load images of the local docker into kind nodes, sending only the layers that the nodes lack.

The base image is part of the node image, so of an application's image only its own layers travel: an OCI
archive that leaves out every blob the nodes' containerd has already. containerd checks each blob's digest,
and the archive names all of them, so a node ends with the same image as after a full load (its ID is
compared at the end).

usage: load.py --nodes NODE,... IMAGE...
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import subprocess
import sys
import tarfile
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlparse

CTR = ("ctr", "--namespace=k8s.io")
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar"


def output(*args: str) -> str:
    return subprocess.run(args, check=True, stdout=subprocess.PIPE, text=True).stdout


def on_node(node: str, *args: str) -> str:
    return output("docker", "exec", node, *args)


def full_name(image: str) -> str:
    """The name as containerd keeps it: docker leaves out its own registry, containerd does not."""
    first, slash, _ = image.partition("/")
    if slash and ("." in first or ":" in first or first == "localhost"):
        return image
    index = urlparse(output("docker", "info", "--format", "{{.IndexServerAddress}}").strip()).hostname or ""
    return f"{index.removeprefix('index.')}/{'' if slash else 'library/'}{image}"


def node_has(node: str, image: str, image_id: str) -> bool:
    """Whether the node's container runtime knows the name as that very image."""
    command = ("docker", "exec", node, "crictl", "inspecti", image)
    found = subprocess.run(command, capture_output=True, check=False)
    return found.returncode == 0 and json.loads(found.stdout)["status"]["id"] == image_id


class Archive:
    """An OCI image layout in a tar file that holds only the blobs missing on the nodes."""

    def __init__(self, path: Path, present: set[str]) -> None:
        self._tar = tarfile.open(path, "w")  # noqa: SIM115 (closed in finish)
        self._written = set(present)
        self._index: list[dict[str, Any]] = []

    def add(self, saved: tarfile.TarFile, entry: dict[str, Any]) -> None:
        """One image of a `docker save` archive, `entry` being its part of that archive's manifest.json."""
        config = _member(saved, entry["Config"]).read()
        layers = []
        for digest, name in zip(json.loads(config)["rootfs"]["diff_ids"], entry["Layers"], strict=True):
            with _member(saved, name) as stream:
                size = stream.seek(0, io.SEEK_END)
                stream.seek(0)
                self._blob(digest, size, stream)
            layers.append({"mediaType": LAYER, "digest": digest, "size": size})
        manifest = {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": {"mediaType": CONFIG, **self._bytes(config)},
            "layers": layers,
        }
        described = {"mediaType": MANIFEST, **self._bytes(json.dumps(manifest).encode())}
        for tag in entry["RepoTags"]:
            self._index.append({**described, "annotations": {"io.containerd.image.name": full_name(tag)}})

    def finish(self) -> None:
        self._file("oci-layout", b'{"imageLayoutVersion": "1.0.0"}')
        self._file("index.json", json.dumps({"schemaVersion": 2, "manifests": self._index}).encode())
        self._tar.close()

    def _bytes(self, data: bytes) -> dict[str, Any]:
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        self._blob(digest, len(data), io.BytesIO(data))
        return {"digest": digest, "size": len(data)}

    def _blob(self, digest: str, size: int, stream: IO[bytes]) -> None:
        if digest in self._written:
            return
        self._written.add(digest)
        info = tarfile.TarInfo("blobs/" + digest.replace(":", "/"))
        info.size = size
        self._tar.addfile(info, stream)

    def _file(self, name: str, data: bytes) -> None:
        info = tarfile.TarInfo(name)
        info.size = len(data)
        self._tar.addfile(info, io.BytesIO(data))


def _member(saved: tarfile.TarFile, name: str) -> IO[bytes]:
    stream = saved.extractfile(name)  # follows the links that stand for equal layers
    if stream is None:
        raise ValueError(f"docker save: {name} is no file")
    return stream


def main() -> int:
    parser = argparse.ArgumentParser(description="load images of the local docker into kind nodes")
    parser.add_argument("--nodes", required=True, help="names of the nodes, joined by commas")
    parser.add_argument("images", nargs="+")
    asked = parser.parse_args()
    nodes: list[str] = asked.nodes.split(",")
    ids = {i: output("docker", "image", "inspect", "-f", "{{.Id}}", i).strip() for i in asked.images}

    wanted = [i for i in ids if not all(node_has(n, full_name(i), ids[i]) for n in nodes)]
    if not wanted:
        print("every node has them")
        return 0
    present = set.intersection(*(set(on_node(n, *CTR, "content", "ls", "-q").split()) for n in nodes))
    with tempfile.TemporaryDirectory() as scratch:
        saved_path, archive_path = Path(scratch, "saved.tar"), Path(scratch, "archive.tar")
        output("docker", "save", "-o", str(saved_path), *wanted)
        archive = Archive(archive_path, present)
        with tarfile.open(saved_path) as saved:
            for entry in json.load(_member(saved, "manifest.json")):
                archive.add(saved, entry)
        archive.finish()
        sizes = [path.stat().st_size / 1e6 for path in (archive_path, saved_path)]
        print("{:.1f} MB of {:.1f} MB travel".format(*sizes))

        def import_on(node: str) -> None:
            with archive_path.open("rb") as f:
                importer = (*CTR, "images", "import", "--all-platforms", "-")
                subprocess.run(("docker", "exec", "-i", node, *importer), stdin=f, check=True)

        with ThreadPoolExecutor(len(nodes)) as pool:
            list(pool.map(import_on, nodes))
    lacking = [f"{i} on {n}" for i in wanted for n in nodes if not node_has(n, full_name(i), ids[i])]
    if lacking:
        print("not loaded:", *lacking, file=sys.stderr)
    return 1 if lacking else 0


if __name__ == "__main__":
    sys.exit(main())
