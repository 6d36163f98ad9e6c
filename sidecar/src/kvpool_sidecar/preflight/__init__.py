"""Preflight checks of a node before a pool is rolled out to it: requirements of the pool's spec, and speed.

Each module checks one subject and yields `Finding`s; `run` collects them in bounded time. The checks leave nothing
behind: files are unnamed or removed immediately, objects and keys are deleted. See docs/reference/preflight.md.
"""
