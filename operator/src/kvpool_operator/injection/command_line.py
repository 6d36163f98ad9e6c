"""Inspection of a container: which engine it runs, and which KV connector the user chose.

Command lines are inspected and never modified: engines are configured by environment variables alone. What is read in
plain arguments is certain. What is found in shell text is not, because the text may test for it or comment on it; the
plug-in inside the engine then decides.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

from kvpool_operator.injection.accelerators import accelerator
from kvpool_operator.injection.engine_start import recognize, shell_text
from kvpool_operator.injection.engine_versions import version_of_image
from kvpool_operator.injection.flags import dotted_values

__all__ = ["ContainerInfo", "inspect_container"]

_CONNECTOR: Final = re.compile(r"\b[A-Z][A-Za-z0-9]*Connector(?:V1)?\b")
_CHOSEN: Final = re.compile(r"""["']kv_connector["']\s*:\s*["']([A-Za-z0-9_.]{1,64})["']""")
_SPEC: Final = re.compile(r"\b[A-Z][A-Za-z0-9]*OffloadingSpec\b")
_KVBM: Final = re.compile(r"\bDynamoConnector\b|--connector[ =]+kvbm\b")
_DYNAMO_LMCACHE: Final = re.compile(r"--connector[ =]+lmcache\b")
_HIDES_CLIENT: Final = (
    (re.compile(r"""(?<![\w$])PYTHONPATH=(?!["']?[^\s"';&|]{0,512}\$\{?PYTHONPATH)"""), "replaces PYTHONPATH"),
    (re.compile(r"(?<![\w$])VLLM_PLUGINS=(?![^\s;&|]{0,512}kvpool)"), "replaces VLLM_PLUGINS"),
    (re.compile(r"\bpython[\d.]*\s+(?:-[a-zA-Z]+\s+)*-[a-zA-Z]*[IE](?=\s|$)"), "starts Python without its environment"),
    (re.compile(r"\benv\s+(?:-i\b|-\s|--ignore-environment)"), "starts the engine without its environment"),
)
_TIER_BYTES: Final = re.compile(r"""cpu_bytes_to_use["'\\]{0,8}\s{0,8}[:=\s]\s{0,8}["'\\]{0,8}(\d{1,15})(?![\d.])""")
_REFERENCE: Final = re.compile(r"\$\(([-._a-zA-Z][-._a-zA-Z0-9]*)\)")
_EXPANDED_LENGTH: Final = 2**20
_LIMIT: Final = 2**50


@dataclass(frozen=True)
class ContainerInfo:
    """Result of the inspection of one container."""

    engine: str
    """"vllm", "sglang", "lmcache" (its server), "trtllm", or empty if no engine was recognized."""
    launcher: str = ""
    """"dynamo" if the engine runs under Dynamo."""
    obstacle: str = ""
    """Why a container that resembles an engine is none. A clause, or empty."""
    warning: str = ""
    """What is uncertain about the recognized engine. A clause, or empty."""
    argv: tuple[str, ...] = ()
    """Plain arguments, with $(NAME) of plain variables expanded. Empty for shell text."""
    connectors: frozenset[str] = frozenset()
    """Names of vLLM connectors in plain arguments."""
    mentioned: frozenset[str] = frozenset()
    """Names of vLLM connectors anywhere, also in shell text and variables."""
    offloading_specs: frozenset[str] = frozenset()
    """Names of specs of vLLM's offloading connector in plain arguments."""
    tier_bytes: int = 0
    """Host memory of the user's offloading connector in bytes, if the command line has it."""
    kvbm: bool = False
    """Whether the engine's connector is Dynamo's block manager."""
    hides_client: str = ""
    """What in the command line hides the client from the engine. A clause, or empty."""
    accelerator: str = ""
    """Name of an accelerator that the client does not support, or empty."""
    version: tuple[int, ...] | None = None
    """Release of the engine from the image tag, if it has one."""
    shell_text: str = ""
    """Text that a shell runs."""


def inspect_container(container: dict[str, Any]) -> ContainerInfo:
    """Inspect name, `command`, `args`, `image`, `resources` and plain `env` values of a container (JSON of the pod)."""
    values = {
        str(e.get("name")): str(e["value"])
        for e in container.get("env") or []
        if isinstance(e, dict) and e.get("value")
    }
    command = [_expanded(str(t), values) for t in container.get("command") or []]
    args = [_expanded(str(t), values) for t in container.get("args") or []]
    image = str(container.get("image") or "")
    start = recognize(str(container.get("name") or ""), command, args, image)
    text = shell_text(command + args)
    argv = [] if text else command + args
    everything = [*command, *args, *values.values()]
    configured = dotted_values(argv, "--kv-transfer-config")
    line = " ".join(command + args)
    by_dynamo = ["LMCacheConnectorV1"] if start.launcher == "dynamo" and _DYNAMO_LMCACHE.search(line) else []
    sizes = [int(n) for t in everything for n in _TIER_BYTES.findall(t)]
    return ContainerInfo(
        engine=start.engine,
        launcher=start.launcher,
        obstacle=start.obstacle,
        warning=start.warning,
        argv=tuple(argv),
        connectors=frozenset(
            [*(name for key, value in configured for name in _connectors(key, value)), *(by_dynamo if argv else [])]
        ),
        mentioned=frozenset([*(name for t in everything for name in _CONNECTOR.findall(t)), *by_dynamo]),
        offloading_specs=frozenset(name for _, value in configured for name in _SPEC.findall(value)),
        tier_bytes=max((n for n in sizes if n < _LIMIT), default=0),
        kvbm=bool(start.engine) and _KVBM.search(" ".join(everything)) is not None,
        hides_client=next((clause for pattern, clause in _HIDES_CLIENT if pattern.search(line)), ""),
        accelerator=accelerator(container),
        version=version_of_image(start.engine, image),
        shell_text=text,
    )


def _connectors(key: str, value: str) -> list[str]:
    """Return the names of connectors in a value of --kv-transfer-config, or of one of its keys."""
    whole = [value] if key == "kv_connector" and value else []
    return [*whole, *_CONNECTOR.findall(value), *_CHOSEN.findall(value)]


def _expanded(word: str, values: dict[str, str]) -> str:
    """Expand $(NAME) as Kubernetes does, for plain variables of the container."""
    if "$(" not in word:
        return word
    found = _REFERENCE.sub(lambda m: values.get(m[1], m[0]), word)
    return found if len(found) <= _EXPANDED_LENGTH else word
