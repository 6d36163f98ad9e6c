"""Exit codes, and the errors that end a command."""

from __future__ import annotations

OK = 0
FINDINGS = 1
"""Findings, or a negative verdict."""
USAGE = 2
UNREACHABLE = 3
"""The cluster cannot be reached or refused the request."""
INTERRUPTED = 130
PIPE_CLOSED = 141


class CliError(Exception):
    """A command cannot continue; `str()` is the sentence for stderr."""

    exit_code = FINDINGS


class UsageError(CliError):
    """An argument, or a file that an argument names, is invalid."""

    exit_code = USAGE


class UnreachableError(CliError):
    """The cluster cannot be reached, or refused the request."""

    exit_code = UNREACHABLE


class ForbiddenError(UnreachableError):
    """The user has no right to make the request."""


class NotFoundError(CliError):
    """The cluster has no such object."""
