"""Pod templates in manifests of any kind, read from text that no API server has checked.

A template is an object with a list `containers`, wherever it is: Pods, workloads, LeaderWorkerSets, RayClusters,
LLMInferenceServices and kinds that do not exist yet. Metadata next to a `spec` belongs to it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import yaml

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Document", "PodTemplate", "read_documents"]

MAX_TEXT: Final = 16 * 2**20
"""Characters of one input. An API object has at most 3 MiB."""
MAX_NODES: Final = 400_000
"""Values of one document after its aliases are expanded."""
MAX_DEPTH: Final = 100
MAX_DOCUMENTS: Final = 10_000
_SEPARATOR: Final = re.compile(r"^---[ \t]*(?:#.*)?$", re.MULTILINE)
_SCALARS: Final = (str, int, float, bool, type(None))


@dataclass(frozen=True)
class PodTemplate:
    """A pod as the API server would receive it, and where the document has it."""

    path: str
    """Path of the template in the document, for example `spec.template`; empty for a Pod."""
    pod: dict[str, Any]
    problem: str = ""
    """Why it cannot be evaluated: a type that no API server accepts. Empty if it can."""
    warnings: tuple[str, ...] = ()
    """What an API server would reject, but does not change the decision."""


@dataclass(frozen=True)
class Document:
    """One object of the input."""

    kind: str
    name: str
    namespace: str
    templates: tuple[PodTemplate, ...]
    problem: str = ""
    """Why it could not be read, otherwise empty."""
    labels: dict[str, str] = field(default_factory=dict)
    """Labels of the object itself, which are not those of its pods."""


def read_documents(text: str) -> list[Document]:
    """Read YAML or JSON: several documents, and objects of kind List. Raises ValueError if the input is too long.

    A document that cannot be read, for example because of a template's placeholders, has a `problem`; the others are
    read.
    """
    if len(text) > MAX_TEXT:
        raise ValueError(f"the input has more than {MAX_TEXT // 2**20} MiB")
    parts = [part for part in _SEPARATOR.split(text) if part.strip()]
    if len(parts) > MAX_DOCUMENTS:
        raise ValueError(f"the input has more than {MAX_DOCUMENTS} documents")
    return [document for part in parts for document in _documents(part)]


def _documents(text: str) -> Iterator[Document]:
    try:
        loaded = _plain(yaml.safe_load(text), _Budget())
    except (yaml.YAMLError, ValueError, RecursionError) as e:
        yield Document("", "", "", (), f"the document is not valid YAML or JSON: {_first_line(e)}")
        return
    objects = loaded if isinstance(loaded, list) else [loaded]
    while objects:
        found = objects.pop(0)
        if not isinstance(found, dict):
            if found is not None:
                yield Document("", "", "", (), "the document is not an object")
            continue
        items = found.get("items")
        if str(found.get("kind", "")).endswith("List") and isinstance(items, list):
            objects = [*items, *objects]
            continue
        yield _document(found)


def _document(found: dict[str, Any]) -> Document:
    metadata = found["metadata"] if isinstance(found.get("metadata"), dict) else {}
    kind, name = str(found.get("kind") or ""), str(metadata.get("name") or "")
    namespace = str(metadata.get("namespace") or "")
    labels = metadata["labels"] if isinstance(metadata.get("labels"), dict) else {}
    return Document(kind, name, namespace, tuple(_templates(found, name)), labels=labels)


def _templates(found: dict[str, Any], name: str) -> Iterator[PodTemplate]:
    todo: list[tuple[tuple[str, ...], Any, Any]] = [((), found, None)]
    while todo:
        path, value, owner = todo.pop(0)
        if isinstance(value, list):
            todo += [((*path[:-1], f"{path[-1]}[{i}]") if path else (), v, None) for i, v in enumerate(value)]
        elif isinstance(value, dict):
            spec = _pod_spec(value)
            if spec is None:
                todo += [((*path, str(k)), v, value if k == "spec" else None) for k, v in value.items()]
                continue
            place = path[:-1] if path and path[-1] == "spec" and owner is not None else path
            metadata = owner.get("metadata") if isinstance(owner, dict) else None
            yield _template(".".join(place), metadata if isinstance(metadata, dict) else {}, spec, name)


def _pod_spec(value: dict[str, Any]) -> dict[str, Any] | None:
    """Return a pod's spec, also of Dynamo's extraPodSpec, which names its engine's container apart."""
    containers = value.get("containers")
    main = value.get("mainContainer")
    if isinstance(main, dict):
        others = containers if isinstance(containers, list) else []
        rest = {k: v for k, v in value.items() if k not in ("mainContainer", "containers")}
        return {**rest, "containers": [{"name": "main", **main}, *others]}
    return value if isinstance(containers, list) and any(isinstance(c, dict) for c in containers) else None


def _template(path: str, metadata: dict[str, Any], spec: dict[str, Any], name: str) -> PodTemplate:
    metadata = {**metadata, "name": metadata.get("name") or name or "unnamed"}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
    problem = _malformed(metadata, spec)
    return PodTemplate(path, pod, problem, () if problem else tuple(_not_strings(metadata, spec)))


def _malformed(metadata: dict[str, Any], spec: dict[str, Any]) -> str:
    """Return what has another type than the API server accepts, and injection relies on. Null is absent."""
    problems = [
        f"metadata.{key} is not an object" for key in ("labels", "annotations") if not _is_object(metadata.get(key))
    ]
    problems += [f"spec.{key} is not a list of objects" for key in _OBJECT_LISTS if not _is_objects(spec.get(key))]
    if not problems:
        containers = [*spec["containers"], *(spec.get("initContainers") or [])]
        problems = [problem for i, c in enumerate(containers) for problem in _malformed_container(i, c)]
    return problems[0] if problems else ""


_OBJECT_LISTS: Final = ("containers", "initContainers", "volumes")


def _malformed_container(index: int, container: dict[str, Any]) -> Iterator[str]:
    name = container.get("name") or f"number {index}"
    for key in ("command", "args"):
        words = container.get(key)
        if words is not None and not (isinstance(words, list) and all(isinstance(w, _SCALARS) for w in words)):
            yield f"{key} of container {name} is not a list of strings"
    for key in ("env", "volumeMounts"):
        if not _is_objects(container.get(key)):
            yield f"{key} of container {name} is not a list of objects"
    for key in ("resources", "securityContext"):
        if not _is_object(container.get(key)):
            yield f"{key} of container {name} is not an object"


def _not_strings(metadata: dict[str, Any], spec: dict[str, Any]) -> Iterator[str]:
    """Yield a warning for each value that must be a string, and is a number, a boolean or null."""
    for key in ("labels", "annotations"):
        wrong = [k for k, v in (metadata.get(key) or {}).items() if not isinstance(v, str)]
        if wrong:
            yield f"the API server rejects metadata.{key}: {wrong[0]} is not a string"
    for container in [*spec["containers"], *(spec.get("initContainers") or [])]:
        words = [*(container.get("command") or []), *(container.get("args") or [])]
        values = [e.get("value") for e in container.get("env") or []]
        if not all(isinstance(v, str) for v in words) or not all(isinstance(v, str | None) for v in values):
            yield f"the API server rejects container {container.get('name')}: some argument or variable is not a string"


def _is_object(value: Any) -> bool:
    return value is None or isinstance(value, dict)


def _is_objects(value: Any) -> bool:
    return value is None or (isinstance(value, list) and all(isinstance(v, dict) for v in value))


class _Budget:
    """Number of values that a document may still have."""

    def __init__(self) -> None:
        self.left = MAX_NODES


def _plain(value: Any, budget: _Budget, depth: int = 0) -> Any:
    """Return a copy without aliases, of JSON types only. Raises ValueError if it is too large or too deep."""
    budget.left -= 1
    if budget.left < 0:
        raise ValueError(f"it has more than {MAX_NODES} values")
    if depth > MAX_DEPTH:
        raise ValueError(f"it is nested more than {MAX_DEPTH} levels")
    if isinstance(value, dict):
        return {str(k): _plain(v, budget, depth + 1) for k, v in value.items()}
    if isinstance(value, list):
        return [_plain(v, budget, depth + 1) for v in value]
    return value if isinstance(value, _SCALARS) else str(value)


def _first_line(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = str(getattr(error, "problem", None) or error).partition("\n")[0][:200]
    return f"{problem} (line {mark.line + 1})" if mark is not None else problem
