"""The client as an injected pod gets it, with planted faults."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpool_sidecar.commands.install_client import install_client

if TYPE_CHECKING:
    from pathlib import Path


def client_copy(folder: Path, *, without: str = "", **texts: str) -> Path:
    """Install the client in `folder`, for an engine's path.

    `without`: a file of the package that is missing. `texts` are added to modules of kvpool.engines, by their path with
    `__` for `/`; a text that begins with a parenthesis replaces the module.
    """
    install_client(str(folder), "")
    if without:
        (folder / "kvpool" / without).unlink()
    for name, text in texts.items():
        path = folder / "kvpool" / "engines" / f"{name.replace('__', '/')}.py"
        path.write_text(text if text.startswith("(") else path.read_text() + text)
    return folder
