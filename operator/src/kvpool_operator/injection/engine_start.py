"""Recognition of the engine that a command line, a shell text or an image starts.

Launchers (`tini --`, `numactl`, `uv run`, `env A=b`) need no table: the words of the engine are searched anywhere in
the command line. With a command, the name of the image alone is no engine: the image of an engine also runs downloads,
benchmarks and routers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

__all__ = ["EngineStart", "recognize", "shell_text"]

_SHELLS: Final = frozenset({"sh", "bash", "dash", "ash", "zsh", "ksh", "su"})
_SHELL_C: Final = re.compile(r"-[a-zA-Z]*c[a-zA-Z]*\Z")
_MODULES: Final = {
    "vllm.entrypoints.openai.api_server": "vllm",
    "vllm.entrypoints.openai.run_batch": "vllm",
    "vllm.entrypoints.api_server": "vllm",
    "vllm.entrypoints.cli.main": "vllm",
    "huggingfaceserver": "vllm",
    "dynamo.vllm": "vllm",
    "sglang.launch_server": "sglang",
    "sglang_router.launch_server": "sglang",
    "dynamo.sglang": "sglang",
    "dynamo.trtllm": "trtllm",
    "tensorrt_llm.commands.serve": "trtllm",
    "lmcache.v1.multiprocess.server": "lmcache",
    "lmcache.v1.multiprocess.http_server": "lmcache",
}
_COMMANDS: Final = {
    ("vllm", "serve"): "vllm",
    ("vllm", "run-batch"): "vllm",
    ("vllm-omni", "serve"): "vllm",
    ("sglang", "serve"): "sglang",
    ("lmcache", "server"): "lmcache",
}
_PROGRAMS: Final = {"trtllm-serve": "trtllm"}
_SCRIPTS: Final = {m.replace(".", "/") + ".py": m for m in _MODULES if "." in m}
_SPACE: Final = r"(?:\s|\\\n)+"
_IN_TEXT: Final = re.compile(
    "|".join(
        [rf"(?<![\w.-])(?P<c{i}>{c}{_SPACE}{word})(?![\w-])" for i, (c, word) in enumerate(_COMMANDS)]
        + [rf"(?:(?<![\w.])|(?<=-m))(?P<m{i}>{re.escape(m)})(?!\w)" for i, m in enumerate(_MODULES) if "." in m]
        + [rf"-m\s*(?P<m{i}>{re.escape(m)})(?![\w.])" for i, m in enumerate(_MODULES) if "." not in m]
        + [rf"(?<![\w.-])(?P<p{i}>{re.escape(p)})(?![\w-])" for i, p in enumerate(_PROGRAMS)]
        + [rf"/(?P<s{i}>{re.escape(s)})(?!\w)" for i, s in enumerate(_SCRIPTS)]
    )
)
_WORDS: Final = ("vllm", "sglang", "lmcache", "dynamo", "trtllm", "tensorrt", "huggingfaceserver")
"""Each launch of an engine has one of them: a fast check before the search."""
_COMMENT: Final = re.compile(r"^[ \t]*#.*$", re.MULTILINE)
_RAY: Final = re.compile(r"\bray\s+start\b|\bKUBERAY_GEN_RAY_START_CMD\b|\bmulti-node-serving\.sh\b")
_RAY_HEAD: Final = re.compile(r"--head\b|\bmulti-node-serving\.sh\s+leader\b")
_RAY_RANKS: Final = re.compile(r"\bLWS_[A-Z_]+|\bmulti-node-serving\.sh\s+worker\b")
_NOT_AN_ENGINE: Final = re.compile(
    r"router|gateway|proxy|exporter|metrics|bench|client|simulator|mock|-sim\b|scheduler|sidecar|epp\b|kv-cache|runtime\b"
)
_ENGINE_IMAGES: Final = (
    re.compile(r"(?:^|[-_.])vllm(?:[-_.]|$)"),
    re.compile(r"^llm-d(?:-(?:cuda|cpu|rocm|xpu|hpu|tpu|aws|gke|gb200|dev|debug|efa)[a-z0-9]*)*$"),
    re.compile(r"^huggingfaceserver(?:[-_.]|$)"),
    re.compile(r"^ray-llm(?:[-_.]|$)"),
)
# flags that the command line of a server has, and that of a download or a benchmark client does not have
_SERVER_FLAGS: Final = frozenset(
    {
        "--gpu-memory-utilization", "--max-model-len", "--max-num-seqs", "--max-num-batched-tokens",
        "--tensor-parallel-size", "--enable-prefix-caching", "--enable-chunked-prefill", "--kv-cache-dtype",
        "--kv-transfer-config", "--enforce-eager",
    }
)  # fmt: skip
_NOT_A_SERVER: Final = frozenset({"bench", "chat", "complete", "collect-env", "download"})


@dataclass(frozen=True)
class EngineStart:
    """Engine that a container starts."""

    engine: str = ""
    """"vllm", "sglang", "lmcache" (its server), "trtllm", or empty if no engine was recognized."""
    launcher: str = ""
    """"dynamo" if the engine runs under Dynamo."""
    obstacle: str = ""
    """Why a container that resembles an engine is none. A clause, or empty."""
    warning: str = ""
    """What is uncertain about a recognized engine. A clause, or empty."""


def recognize(name: str, command: list[str], args: list[str], image: str) -> EngineStart:
    """Recognize the engine of a container by its name, command, args and image."""
    tokens = command + args
    text = shell_text(tokens)
    started = _in_text(text) if text else _in_words(tokens)
    if started:
        return _of_launch(started, tokens)
    return _of_image(name, command, args, image, " ".join(tokens))


def shell_text(tokens: list[str]) -> str:
    """Return the text of `sh -c TEXT ...` with its positional parameters, or of an entry point that is a shell."""
    shell = next((i for i, token in enumerate(tokens) if _basename(token) in _SHELLS), len(tokens))
    for j in range(shell + 1, len(tokens)):
        if _SHELL_C.match(tokens[j]):
            return "\n".join(tokens[j + 1 :])
    if tokens and _SHELL_C.match(tokens[0]):
        return "\n".join(tokens[1:])
    return "\n".join(t for t in tokens if re.search(r"\s", t.strip()) and _in_text(t))


def _in_text(text: str) -> str:
    if not any(word in text for word in _WORDS):
        return ""
    found = _IN_TEXT.search(_COMMENT.sub("", text))
    if found is None or found.lastgroup is None:
        return ""
    kind, index = found.lastgroup[0], int(found.lastgroup[1:])
    if kind == "c":
        return list(_COMMANDS)[index][0]
    if kind == "s":
        return list(_SCRIPTS.values())[index]
    return list(_MODULES if kind == "m" else _PROGRAMS)[index]


def _in_words(argv: list[str]) -> str:
    """Return the module, command or program that starts an engine, or an empty string."""
    for word, following in pairwise([*argv, ""]):
        module = following if word == "-m" else word[2:] if word.startswith("-m") else ""
        if module in _MODULES:
            return module
        program = _basename(module or word)
        if (program, following) in _COMMANDS or program in _PROGRAMS:
            return program
        script = next((s for s in _SCRIPTS if word.endswith(f"/{s}")), "")
        if script:
            return _SCRIPTS[script]
    return ""


def _of_launch(started: str, tokens: list[str]) -> EngineStart:
    if started == "huggingfaceserver" and _has_value(tokens, "--backend", "huggingface"):
        return EngineStart(obstacle="serves with Hugging Face's backend, which has no KV cache to share")
    engine = (
        _MODULES.get(started)
        or _PROGRAMS.get(started)
        or next((e for (c, _), e in _COMMANDS.items() if c == started), "")
    )
    return EngineStart(
        engine,
        "dynamo" if started.startswith("dynamo.") else "",
        warning="uses the pool only if it serves with vLLM" if started == "huggingfaceserver" else "",
    )


def _of_image(name: str, command: list[str], args: list[str], image: str, line: str) -> EngineStart:
    """Recognize an image whose entry point is a server. Images of SGLang and LMCache have no such entry point."""
    is_image = _is_engine_image(image)
    if _RAY.search(line) or "ray-head" in name or "ray-worker" in name:
        return _of_ray(name, line, is_image=is_image)
    if not is_image:
        return EngineStart()
    if command:
        flags = {w.partition("=")[0].replace("_", "-") for w in args + command}
        is_server = not _NOT_A_SERVER & {*args, *command} and flags & _SERVER_FLAGS
        return EngineStart("vllm") if is_server else EngineStart()
    if args and not args[0].startswith("-") and _basename(args[0]) in _OTHER_PROGRAMS:
        return EngineStart()
    return _of_launch("huggingfaceserver", args) if "huggingfaceserver" in image else EngineStart("vllm")


_OTHER_PROGRAMS: Final = frozenset(
    {"python", "python3", "bash", "sh", "ray", "hf", "huggingface-cli", "sleep", "tail", "cat", "pip", "curl", "vllm"}
)


def _of_ray(name: str, line: str, *, is_image: bool) -> EngineStart:
    if "ray-head" in name or _RAY_HEAD.search(line):
        return EngineStart(obstacle="runs a Ray head, which is no engine; label the pods in which the engine runs")
    if not is_image:
        return EngineStart()
    if _RAY_RANKS.search(line):
        return EngineStart(
            obstacle="runs a Ray worker of an engine whose scheduler, the user of the pool, runs in the leader; "
            "label the leader's pod"
        )
    return EngineStart("vllm", warning="runs a Ray worker: it uses the pool only if an engine's scheduler runs in it")


def _is_engine_image(image: str) -> bool:
    name = image.partition("@")[0].rpartition("/")[2].partition(":")[0].lower()
    return any(p.search(name) for p in _ENGINE_IMAGES) and not _NOT_AN_ENGINE.search(name)


def _has_value(tokens: list[str], flag: str, value: str) -> bool:
    return f"{flag}={value}" in tokens or any(pair == (flag, value) for pair in pairwise(tokens))


def _basename(token: str) -> str:
    return token.rpartition("/")[2]
