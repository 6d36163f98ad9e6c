"""What a container's command line starts, and how its engine can be told of the pool.

Shell text is read, never edited: quoting, expansions and line ends are the user's. Where the command line itself
cannot be extended safely, the engine is told through its environment (a plug-in of the client reads it).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import Any, Final

__all__ = ["Channel", "Reading", "read_container"]

_SHELLS: Final = frozenset({"sh", "bash", "dash", "ash", "zsh", "ksh"})
_SHELL_C: Final = re.compile(r"-[a-zA-Z]*c[a-zA-Z]*\Z")
_MODULES: Final = ("vllm.entrypoints.openai.api_server", "vllm.entrypoints.cli.main")
_SCRIPTS: Final = tuple(m.replace(".", "/") + ".py" for m in _MODULES)
_IN_TEXT: Final = re.compile(
    r"(?<![\w-])vllm(?:\s|\\\n)+serve(?![\w-])|vllm\.entrypoints\.(?:openai\.api_server|cli\.main)(?!\w)"
)
# vLLM takes underscores for dashes, `--flag=value`, `--flag.key value`, and argparse takes unambiguous beginnings
_CONNECTOR_FLAG: Final = re.compile(r"(?<![\w-])--kv[-_](?:t|offloading)[\w-]*")
_HASH_FLAG: Final = re.compile(r"--prefix[-_]caching[-_]h[\w-]*")
_NOT_AN_ENGINE: Final = re.compile(r"router|gateway|proxy|exporter|metrics|bench|client|simulator|-sim\b")


class Channel(Enum):
    """How the engine is told of its connector."""

    ARGS = "args"
    ENVIRONMENT = "environment"


@dataclass(frozen=True)
class Reading:
    """What was found in one container."""

    engine: str
    """"vllm", or empty when no engine was recognised."""
    channel: Channel
    connector_present: bool = False
    """The user already chose a connector (or vLLM's own offloading), in arguments, shell text or environment."""
    hash_algo_present: bool = False


def read_container(container: dict[str, Any]) -> Reading:
    """Read `command`, `args`, `image` and plain `env` values of a container (the pod's JSON)."""
    command = [str(t) for t in container.get("command") or []]
    args = [str(t) for t in container.get("args") or []]
    tokens = command + args
    values = [str(e["value"]) for e in container.get("env") or [] if isinstance(e, dict) and e.get("value")]
    engine, channel = _engine(command, args, str(container.get("image") or ""))
    return Reading(
        engine=engine,
        channel=channel,
        connector_present=any(_CONNECTOR_FLAG.search(t) for t in tokens + values),
        hash_algo_present=any(_HASH_FLAG.match(t) for t in tokens),
    )


def _engine(command: list[str], args: list[str], image: str) -> tuple[str, Channel]:
    tokens = command + args
    text = _shell_text(tokens)
    if text is not None:
        return ("vllm" if _IN_TEXT.search(text) else "", Channel.ENVIRONMENT)
    if _starts_vllm(tokens):
        return "vllm", _channel(tokens)
    if not _is_vllm_image(image):
        return "", Channel.ENVIRONMENT
    # args of the image's own entry point; with a command of the user's or with no args (adding some would replace the
    # image's own) only the environment is safe
    return "vllm", Channel.ENVIRONMENT if command or not args else _channel(tokens)


def _shell_text(tokens: list[str]) -> str | None:
    """The text of `sh -c TEXT ...` with its positional parameters; empty for a shell that runs a script file."""
    for i, token in enumerate(tokens):
        if _basename(token) not in _SHELLS:
            continue
        for j in range(i + 1, len(tokens)):
            if _SHELL_C.match(tokens[j]):
                return "\n".join(tokens[j + 1 :])
        return ""
    return None


def _starts_vllm(words: list[str]) -> bool:
    for word, following in pairwise([*words, ""]):
        if _basename(word) == "vllm" and following == "serve":
            return True
        if (word == "-m" and following in _MODULES) or word.endswith(_SCRIPTS):
            return True
    return False


def _channel(tokens: list[str]) -> Channel:
    """`--config FILE` may name a connector that an argument of ours would override; after `--` nothing is a flag."""
    unsafe = any(t in ("--", "--config") or t.startswith("--config=") for t in _after_launcher(tokens))
    return Channel.ENVIRONMENT if unsafe else Channel.ARGS


def _after_launcher(words: list[str]) -> list[str]:
    """`tini -- vllm serve ...`: the `--` of a launcher says nothing about vLLM's own arguments."""
    for i, word in enumerate(words):
        if word == "-m" or _basename(word) == "vllm":
            return words[i + 1 :]
    return words


def _is_vllm_image(image: str) -> bool:
    name = image.partition("@")[0].rpartition("/")[2].partition(":")[0]
    return re.search(r"(?:^|[-_.])vllm(?:[-_.]|$)", name) is not None and not _NOT_AN_ENGINE.search(name)


def _basename(token: str) -> str:
    return token.rpartition("/")[2]
