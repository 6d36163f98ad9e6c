"""Conversion of pydantic's JSON schema to a structural schema for the API server.

The rules are those of the Kubernetes documentation on structural schemas: one type at each node, no $ref, no unions but
integer-or-string, exclusiveMinimum as a flag (OpenAPI 3.0), no additionalProperties beside properties.
"""

from __future__ import annotations

from typing import Any, Final

__all__ = ["structural"]

Schema = dict[str, Any]

_KEPT: Final[tuple[str, ...]] = (
    "description",
    "type",
    "format",
    "enum",
    "default",
    "pattern",
    "minimum",
    "exclusiveMinimum",
    "maximum",
    "exclusiveMaximum",
    "multipleOf",
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "minProperties",
    "maxProperties",
    "required",
)


def structural(schema: Schema) -> Schema:
    """Convert a schema. ValueError if it has no structural form: recursion, unions."""
    return _convert(schema, schema.get("$defs", {}), ())


def _convert(node: Schema, defs: dict[str, Schema], inside: tuple[str, ...]) -> Schema:
    node = dict(node)
    while "$ref" in node:
        target = node.pop("$ref").rsplit("/", 1)[1]
        if target in inside:
            raise ValueError(f"{target} contains itself, which a CRD does not support")
        inside = (*inside, target)
        node = {**defs[target], **node}  # keywords next to the reference (description, default) take precedence
    int_or_string = node.get("x-kubernetes-int-or-string", False)
    if "anyOf" in node and not int_or_string:
        arms = [a for a in node.pop("anyOf") if a.get("type") != "null"]
        if len(arms) != 1:
            raise ValueError(f"a union has no structural form: {arms}")
        return _convert({**arms[0], **node}, defs, inside)
    out: Schema = {k: node[k] for k in _KEPT if k in node}
    if "description" in out:
        out["description"] = " ".join(out["description"].split())
    out |= {k: v for k, v in node.items() if k.startswith("x-kubernetes-")}
    if out.get("default", ...) is None:
        del out["default"]  # Kubernetes omits null
    if int_or_string:
        out.pop("type", None)
    if "const" in node:
        out["enum"] = [node["const"]]
    for bound in ("Minimum", "Maximum"):
        if not isinstance(out.get(f"exclusive{bound}", True), bool):
            out[bound.lower()] = out[f"exclusive{bound}"]
            out[f"exclusive{bound}"] = True
    if "properties" in node:
        out["properties"] = {k: _convert(v, defs, inside) for k, v in node["properties"].items()}
    elif isinstance(node.get("additionalProperties"), dict):
        out["additionalProperties"] = _convert(node["additionalProperties"], defs, inside)
    if "items" in node:
        out["items"] = _convert(node["items"], defs, inside)
    return out
