"""`python -m bench sessions`: what a user gains when a conversation moves to another node. See
`docs/project/benchmarks.md`."""

from __future__ import annotations


def main(argv: list[str]) -> int:
    """Run the benchmark; the exit status of the command."""
    from bench.sessions.command import main as run

    return run(argv)
