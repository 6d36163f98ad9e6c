"""`make release-check`: what a release consists of, built and checked without publishing anything.

Wheels have valid metadata, a license, a readme and classifiers; the four distributions, the chart and its images have
one version; the installer of `kubectl` renders. Exit code 1 with one sentence for each problem.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import tomllib
import yaml
from packaging.metadata import Metadata

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parent.parent
PROJECTS = ("client", "sidecar", "operator", "cli")
OWN = ("kvpool", "kvpool-sidecar", "kvpool-operator", "kvpool-cli")


def version_problems(root: Path) -> Iterator[str]:
    """Yield where a version differs from that of the client."""
    versions = {}
    for project in PROJECTS:
        table = tomllib.loads((root / project / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        versions[f"{project}/pyproject.toml"] = table["version"]
        for requirement in (*table["dependencies"], *_extras(table)):
            name, _, pin = requirement.partition("==")
            if name.partition("[")[0] in OWN:
                versions[f"{project}/pyproject.toml: {name}"] = pin
    chart = yaml.safe_load((root / "charts/kvpool/Chart.yaml").read_text(encoding="utf-8"))
    versions["charts/kvpool/Chart.yaml: version"] = chart["version"]
    versions["charts/kvpool/Chart.yaml: appVersion"] = chart["appVersion"]
    for image in yaml.safe_load(chart["annotations"]["artifacthub.io/images"]):
        versions[f"charts/kvpool/Chart.yaml: {image['name']}"] = image["image"].rpartition(":")[2]
    wanted = versions["client/pyproject.toml"]
    for place, version in versions.items():
        if version != wanted:
            yield f"{place} is {version or 'not pinned'}, client/pyproject.toml is {wanted}"


def _extras(table: dict[str, dict[str, list[str]]]) -> Iterator[str]:
    for requirements in table.get("optional-dependencies", {}).values():
        yield from requirements


def wheel_problems(wheel: Path) -> Iterator[str]:
    """Yield what a wheel lacks for an index: core metadata, license, readme, classifiers, types."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        try:
            found = Metadata.from_email(archive.read(metadata), validate=True)
        except ExceptionGroup as e:  # noqa: F821 - of Python 3.11, which the tools need
            yield from (f"{wheel.name}: {problem}" for problem in e.exceptions)
            return
    missing = {
        "a description": found.description,
        "a readme in Markdown": found.description_content_type == "text/markdown",
        "a license expression": found.license_expression,
        "a license file": any(name.endswith("/licenses/LICENSE") for name in names),
        "classifiers": found.classifiers,
        "requires-python": found.requires_python,
        "py.typed": any(name.endswith("/py.typed") for name in names),
    }
    yield from (f"{wheel.name}: {what} is missing" for what, is_there in missing.items() if not is_there)
    yield from (f"{wheel.name}: {name} belongs to the tests" for name in names if "/tests/" in name)


def build(out: Path) -> list[Path]:
    """Build the wheels into `out`. CalledProcessError if that fails."""
    for project in PROJECTS:
        command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out.absolute())]
        subprocess.run(command, cwd=ROOT / project, check=True, stdout=subprocess.DEVNULL)
    return sorted(out.glob("*.whl"))


def main() -> int:
    """Run all checks; 0 if a release could be made."""
    parser = argparse.ArgumentParser("python -m supply.release", description=__doc__)
    parser.add_argument("out", type=Path, help="directory for the wheels")
    out = parser.parse_args().out
    for old in out.glob("*.whl"):
        old.unlink()
    wheels = build(out)
    problems = [*version_problems(ROOT)]
    for wheel in wheels:
        problems += wheel_problems(wheel)
    if len(wheels) != len(PROJECTS):
        problems.append(f"{len(wheels)} wheels were built, {len(PROJECTS)} are expected")
    for problem in problems:
        print(f"release: {problem}", file=sys.stderr)
    if not problems:
        print("release:", ", ".join(wheel.name for wheel in wheels))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
