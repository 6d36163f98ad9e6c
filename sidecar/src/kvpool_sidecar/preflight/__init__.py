"""Looks at a node before a pool is rolled out to it: is there what the pool's spec asks for, and how fast is it?

Each module looks at one thing and answers `Finding`s; `run` puts them together in bounded time. Nothing stays: files
have no name or go at once, objects and keys are removed. See docs/reference/preflight.md.
"""
