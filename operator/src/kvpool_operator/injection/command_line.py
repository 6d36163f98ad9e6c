"""Inspection of a container: which engine its command line starts, and how the engine can be configured.

Shell text is inspected but never modified, because its quoting and expansions belong to the user. If the command line
cannot be extended safely, the engine is configured by its environment, which a plug-in of the client reads.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import Any, Final

from kvpool_operator.injection.engine_versions import version_of_image

__all__ = ["Channel", "ContainerInfo", "inspect_container"]

_SHELLS: Final = frozenset({"sh", "bash", "dash", "ash", "zsh", "ksh"})
_SHELL_C: Final = re.compile(r"-[a-zA-Z]*c[a-zA-Z]*\Z")
_MODULES: Final = {
    "vllm.entrypoints.openai.api_server": "vllm",
    "vllm.entrypoints.cli.main": "vllm",
    "dynamo.vllm": "vllm",
    "sglang.launch_server": "sglang",
    "dynamo.sglang": "sglang",
    "dynamo.trtllm": "trtllm",
    "lmcache.v1.multiprocess.server": "lmcache",
    "lmcache.v1.multiprocess.http_server": "lmcache",
}
_COMMANDS: Final = {("vllm", "serve"): "vllm", ("sglang", "serve"): "sglang", ("lmcache", "server"): "lmcache"}
_SCRIPTS: Final = {m.replace(".", "/") + ".py": e for m, e in _MODULES.items()}
_IN_TEXT: Final = re.compile(
    "|".join(
        [rf"(?<![\w-])({c})(?:\s|\\\n)+{word}(?![\w-])" for c, word in _COMMANDS]
        + [rf"(?<![\w.])({re.escape(m)})(?!\w)" for m in _MODULES]
    )
)
# vLLM takes underscores for dashes, `--flag=value`, `--flag.key value`, and argparse takes unambiguous beginnings
_CONNECTOR_FLAG: Final = re.compile(r"(?<![\w-])--kv[-_](?:t|offloading)[\w-]*")
_CONNECTOR: Final = re.compile(r"\b[A-Z][A-Za-z0-9]*Connector(?:V1)?\b")
_KVBM: Final = re.compile(r"\bDynamoConnector\b|--connector[ =]+kvbm\b")
_HASH_FLAG: Final = re.compile(r"--prefix[-_]caching[-_]h[\w-]*")
_NOT_AN_ENGINE: Final = re.compile(r"router|gateway|proxy|exporter|metrics|bench|client|simulator|-sim\b")


class Channel(Enum):
    """Channel that configures the connector of the engine."""

    ARGS = "args"
    ENVIRONMENT = "environment"


@dataclass(frozen=True)
class ContainerInfo:
    """Result of the inspection of one container."""

    engine: str
    """"vllm", "sglang", "lmcache" (its server), "trtllm", or empty if no engine was recognized."""
    channel: Channel
    connector_present: bool = False
    """The user already chose a connector (or vLLM's own offloading), in arguments, shell text or environment."""
    hash_algo_present: bool = False
    connectors: frozenset[str] = frozenset()
    """Names of vLLM connectors in the command line or environment."""
    kvbm: bool = False
    """Whether the engine's connector is Dynamo's block manager."""
    launcher: str = ""
    """"dynamo" if the engine runs under Dynamo."""
    version: tuple[int, ...] | None = None
    """Engine version from the image tag, if it has one."""
    shell_text: str = ""
    """Text of a `sh -c`. It is inspected but never modified."""


def inspect_container(container: dict[str, Any]) -> ContainerInfo:
    """Inspect `command`, `args`, `image` and plain `env` values of a container (the JSON of the pod)."""
    command = [str(t) for t in container.get("command") or []]
    args = [str(t) for t in container.get("args") or []]
    tokens = command + args
    values = [str(e["value"]) for e in container.get("env") or [] if isinstance(e, dict) and e.get("value")]
    engine, launcher, channel = _engine(command, args, str(container.get("image") or ""))
    return ContainerInfo(
        engine=engine,
        channel=channel,
        connector_present=any(_CONNECTOR_FLAG.search(t) for t in tokens + values),
        hash_algo_present=any(_HASH_FLAG.match(t) for t in tokens),
        connectors=frozenset(name for t in tokens + values for name in _CONNECTOR.findall(t)),
        kvbm=bool(engine) and _KVBM.search(" ".join(tokens + values)) is not None,
        launcher=launcher,
        version=version_of_image(engine, str(container.get("image") or "")),
        shell_text=_shell_text(tokens) or "",
    )


def _engine(command: list[str], args: list[str], image: str) -> tuple[str, str, Channel]:
    tokens = command + args
    text = _shell_text(tokens)
    if text is not None:
        found = _IN_TEXT.search(text)
        started = next(g for g in found.groups() if g) if found else ""
        return *_engine_and_launcher(started), Channel.ENVIRONMENT
    started = _started(tokens)
    if started:
        return *_engine_and_launcher(started), _channel(tokens)
    engine = _engine_of_image(image)
    if not engine:
        return "", "", Channel.ENVIRONMENT
    # args of the image's own entry point; with a command of the user's or with no args (adding some would replace the
    # image's own) only the environment is safe
    return engine, "", Channel.ENVIRONMENT if command or not args else _channel(tokens)


def _engine_and_launcher(started: str) -> tuple[str, str]:
    """Return engine and launcher of a module or command."""
    engine = _MODULES.get(started) or next((e for (c, _), e in _COMMANDS.items() if c == started), "")
    return engine, "dynamo" if started.startswith("dynamo.") else ""


def _shell_text(tokens: list[str]) -> str | None:
    """Return the text of `sh -c TEXT ...` with its positional parameters; empty for a script file."""
    for i, token in enumerate(tokens):
        if _basename(token) not in _SHELLS:
            continue
        for j in range(i + 1, len(tokens)):
            if _SHELL_C.match(tokens[j]):
                return "\n".join(tokens[j + 1 :])
        return ""
    return None


def _started(argv: list[str]) -> str:
    """Return the module or command that starts an engine, or an empty string."""
    for word, following in pairwise([*argv, ""]):
        if (_basename(word), following) in _COMMANDS:
            return _basename(word)
        if word == "-m" and following in _MODULES:
            return following
        script = next((s for s in _SCRIPTS if word.endswith(f"/{s}")), "")
        if script:
            return script[: -len(".py")].replace("/", ".")
    return ""


def _channel(tokens: list[str]) -> Channel:
    """Use the environment after `--`, and with `--config FILE`, whose connector an argument would override."""
    unsafe = any(t in ("--", "--config") or t.startswith("--config=") for t in _after_launcher(tokens))
    return Channel.ENVIRONMENT if unsafe else Channel.ARGS


def _after_launcher(argv: list[str]) -> list[str]:
    """Skip a launcher such as `tini -- vllm serve ...`, whose `--` does not end the engine's flags."""
    for i, word in enumerate(argv):
        if word == "-m" or any(_basename(word) == c for c, _ in _COMMANDS):
            return argv[i + 1 :]
    return argv


def _engine_of_image(image: str) -> str:
    """Recognize an image with vLLM's server as entry point. Images of SGLang and LMCache have no entry point."""
    name = image.partition("@")[0].rpartition("/")[2].partition(":")[0]
    found = re.search(r"(?:^|[-_.])vllm(?:[-_.]|$)", name) is not None and not _NOT_AN_ENGINE.search(name)
    return "vllm" if found else ""


def _basename(token: str) -> str:
    return token.rpartition("/")[2]
