"""Base of every API model: names and versions of the API group, metadata, label selectors, parsing."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.alias_generators import to_camel

from kvpool_operator.api.names import LabelKey, LabelValue, ObjectName, check_label_keys
from kvpool_operator.api.rules import Rule, with_rules
from kvpool_operator.errors import InvalidPoolError

__all__ = [
    "API_VERSION",
    "GROUP",
    "VERSION",
    "Count",
    "Counts",
    "KVCacheObject",
    "LabelSelector",
    "Metadata",
    "Model",
    "SecretName",
    "Text",
    "section",
]

GROUP = "kvpool.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"

_MAX_ERRORS = 5

Text = Annotated[str, Field(max_length=253)]
Count = Annotated[int, Field(ge=0, json_schema_extra={"format": "int64"})]
# atomic: server-side apply replaces the whole map, because a map that loses its last entry would become null
Counts = Annotated[
    dict[Annotated[str, Field(max_length=64)], Count],
    Field(max_length=32, json_schema_extra={"x-kubernetes-map-type": "atomic"}),
]
VALUES_FIT_OPERATOR: Final = Rule(
    "(self.operator in ['In', 'NotIn']) == (has(self.values) && size(self.values) > 0)",
    "give values together with operator In or NotIn, and only then",
)


class Model(BaseModel):
    """Camel case in manifests, snake case in Python. Unknown fields are ignored: the API server checks for them."""

    model_config = ConfigDict(
        alias_generator=to_camel, populate_by_name=True, use_attribute_docstrings=True, frozen=True, extra="ignore"
    )


def section(kind: type[Model]) -> Any:
    """Field of a spec section that has all its defaults when the manifest omits it.

    The default holds the plain values too, because the API server validates a section before it fills in defaults.
    """
    plain: dict[str, Any] = {k: v for k, v in kind().model_dump(by_alias=True).items() if isinstance(v, (str, int))}
    return Field(default_factory=kind, json_schema_extra={"default": plain})


class LabelExpression(Model):
    """One label selector requirement."""

    model_config = ConfigDict(json_schema_extra=with_rules(VALUES_FIT_OPERATOR))

    key: LabelKey
    """Label key."""
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"]
    """In and NotIn compare with `values`; Exists and DoesNotExist check only that the key is present or absent."""
    values: Annotated[list[LabelValue], Field(max_length=64)] = Field(
        default_factory=list, json_schema_extra={"x-kubernetes-list-type": "atomic"}
    )
    """Values for In and NotIn. Must be empty for Exists and DoesNotExist."""

    @model_validator(mode="after")
    def _fits(self) -> LabelExpression:
        VALUES_FIT_OPERATOR.check((self.operator in ("In", "NotIn")) == bool(self.values))
        return self


class LabelSelector(Model):
    """Kubernetes label selector. All requirements must hold. An empty selector matches every object."""

    match_labels: Annotated[dict[str, LabelValue], Field(max_length=32), AfterValidator(check_label_keys)] = Field(
        default_factory=dict
    )
    """Labels that an object must have with exactly these values."""
    match_expressions: Annotated[list[LabelExpression], Field(max_length=16)] = Field(
        default_factory=list, json_schema_extra={"x-kubernetes-list-type": "atomic"}
    )
    """Further label requirements."""


class SecretName(Model):
    """Reference to a Secret in the namespace of the pool."""

    name: ObjectName
    """Name of the Secret."""


class Metadata(Model):
    """The fields of an object's metadata that the operator reads."""

    name: str
    namespace: str = "default"
    uid: str = ""
    generation: int = 0
    resource_version: str = ""
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None
    finalizers: list[str] = Field(default_factory=list)
    annotations: dict[str, str] = Field(default_factory=dict)


class KVCacheObject(Model):
    """Object of one of the kinds of this API, as the API server stores it."""

    metadata: Metadata

    @classmethod
    def parse(cls, raw: dict[str, Any]) -> Self:
        """Validate a manifest. InvalidPoolError lists the first invalid fields."""
        try:
            return cls.model_validate(raw)
        except ValidationError as e:
            raise InvalidPoolError(_explain(e)) from None
        except RecursionError:
            raise InvalidPoolError("the object is nested too deeply") from None


def _explain(error: ValidationError) -> str:
    """Field and message of each error, without the value: a value can be large or secret."""
    messages = []
    for e in error.errors(include_url=False, include_context=False, include_input=False)[:_MAX_ERRORS]:
        where = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in e["loc"] if p not in ("int", "str"))
        message = "no such field: remove it" if e["type"] == "extra_forbidden" else e["msg"]
        messages.append(f"{where.lstrip('.')[:200]}: {message.removeprefix('Value error, ')}")
    return "; ".join(messages)
