"""Check that every docs/assets/*.svg was rendered from its docs/drawings/*.d2, and that every drawing has one."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1]


def problems() -> list[str]:
    """List the drawings whose picture is missing or was rendered from another source."""
    found = []
    for source in sorted((DOCS / "drawings").glob("*.d2")):
        picture = DOCS / "assets" / f"{source.stem}.svg"
        digest = hashlib.sha256(source.read_bytes()).hexdigest()
        if not picture.is_file():
            found.append(f"{picture}: missing; run make drawings and commit the result")
        elif f"<!-- source {digest} -->" not in picture.read_text()[:200]:
            found.append(f"{picture}: not rendered from the present {source.name}; run make drawings")
    return found


if __name__ == "__main__":
    sys.exit("\n".join(problems()) or None)
