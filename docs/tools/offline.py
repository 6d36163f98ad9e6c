"""Check that a built site loads nothing from another host: `python docs/tools/offline.py out/site`.

Links that a reader may follow are allowed; scripts, styles, fonts, pictures, frames and preloads are not. Material's
bundle names two hosts that it asks only for Mermaid diagrams and for pages opened as files: no page has a diagram.
"""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path

_LOADS = {
    "script": "src",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "video": "src",
    "audio": "src",
    "embed": "src",
}
_CSS_URL = re.compile(r"(?:url\(|@import\s+)[\"']?((?:https?:)?//[^)\"'\s]+)")


class _Loads(HTMLParser):
    """Collects the addresses that a browser would load by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        address = values.get(_LOADS.get(tag, ""))
        if tag == "link" and (values.get("rel") or "") not in {"canonical", "next", "prev", "alternate", "edit"}:
            address = values.get("href")
        if address:
            self.addresses.append(address)
        if "mermaid" in (values.get("class") or "").split():
            self.addresses.append("https://unpkg.com/mermaid")


def outside(site: Path) -> list[str]:
    """List `file: address` for everything that is loaded from another host."""
    found = []
    for path in sorted(site.rglob("*")):
        if path.suffix == ".html":
            parser = _Loads()
            parser.feed(path.read_text())
            addresses = [a for a in parser.addresses if re.match(r"(?:https?:)?//", a)]
        elif path.suffix in {".css", ".svg"}:
            addresses = _CSS_URL.findall(path.read_text())
        else:
            continue
        found += [f"{path}: loads {address}" for address in addresses]
    return found


if __name__ == "__main__":
    sys.exit("\n".join(outside(Path(sys.argv[1]))) or None)
