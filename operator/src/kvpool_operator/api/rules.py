"""Validation rules beyond types: as CEL for the API server, and as Python for manifests from other sources.

Both return the same message, which names the correct value. Each rule that a single object can break has an example in
operator/tests/bad_pools; tests compare CEL, Python and example.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final

from pydantic import AfterValidator, Field

from kvpool_operator.api import duration, quantity

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "Rule",
    "bytes_between",
    "count_or_percent",
    "duration_between",
    "host_path",
    "immutable",
    "matching",
    "name",
    "quote",
    "refined",
    "reserve",
    "with_rules",
]


@dataclass(frozen=True)
class Rule:
    """Entry of x-kubernetes-validations. `cel` is true for valid objects."""

    cel: str
    message: str
    field_path: str = ""
    """Field that an error names, if it is not the one with the rule."""

    def schema(self) -> dict[str, Any]:
        where = {"fieldPath": self.field_path} if self.field_path else {}
        return {"rule": self.cel, "message": self.message, **where}

    def check(self, allowed: bool) -> None:
        """Validate in Python: ValueError with the same message."""
        if not allowed:
            raise ValueError(self.message)


def with_rules(*rules: Rule, **more: Any) -> dict[str, Any]:
    """Return `json_schema_extra` of a field or a model."""
    return {"x-kubernetes-validations": [r.schema() for r in rules], **more}


def immutable(what: str, instead: str) -> Rule:
    """Rule for an immutable field. Only the API server has the old object, so Python does not check it."""
    return Rule("self == oldSelf", f"{what} cannot be changed: {instead}")


def quote(pattern: str) -> str:
    return "'" + pattern.replace("\\", "\\\\") + "'"


def bytes_between(low: str, high: str, what: str, *more: Rule) -> Any:
    """Field type: a quantity of bytes from `low` to `high`, with the error message `what`."""
    # each one-element list binds a value: the API server estimates the cost of a rule by its string reads, and older
    # versions assume the maximum request size as the length of integer-or-string
    rule = Rule(
        "[string(self)].all(text, isQuantity(text) && [quantity(text)].all(size, "
        f"!size.isLessThan(quantity('{low}')) && !size.isGreaterThan(quantity('{high}'))))",
        what,
    )

    def check(value: int | str) -> int | str:
        try:
            fits = quantity.to_bytes(low) <= quantity.to_bytes(value) <= quantity.to_bytes(high)
        except ValueError:
            fits = False
        rule.check(fits)
        return value

    extra = with_rules(rule, *more, **{"x-kubernetes-int-or-string": True, "maxLength": 32})
    return Annotated[int | str, Field(json_schema_extra=extra), AfterValidator(check)]


def duration_between(low: str, high: str, what: str) -> Any:
    """Field type: a duration from `low` to `high`, with the error message `what`."""
    rule = Rule(
        f"self.matches({quote(duration.FORM)}) && "
        f"duration(self) >= duration('{low}') && duration(self) <= duration('{high}')",
        what,
    )

    def check(value: str) -> str:
        try:
            fits = duration.to_ms(low) <= duration.to_ms(value) <= duration.to_ms(high)
        except ValueError:
            fits = False
        rule.check(fits)
        return value

    return Annotated[str, Field(max_length=32, json_schema_extra=with_rules(rule)), AfterValidator(check)]


_CLEAN: Final = r"^(/[A-Za-z0-9_.-]+)+$"
_DOTS: Final = r"(^|/)[.]{1,2}(/|$)"
_SYSTEM: Final = (
    r"^/((bin|boot|dev|efi|etc|home|host|lib|lib32|lib64|nix|proc|root|run|sbin|snap|sys|tmp|usr)(/.*)?"
    r"|(data|media|mnt|opt|srv|var|var/mnt|var/lib|var/cache)|opt/cni(/.*)?"
    r"|var/(log|run|snap|spool|tmp)(/.*)?"
    r"|var/lib/(NetworkManager|calico|cilium|cloud|cni|containerd|containers|crio|docker|dpkg|etcd|k0s|kubelet|libvirt"
    r"|longhorn|minikube|mysql|postgresql|rancher|rook|rpm|systemd)(/.*)?)$"
)

PATH_IS_CLEAN: Final = Rule(
    f"self.matches({quote(_CLEAN)})",
    "write an absolute path such as /mnt/nvme/kv: a slash before each name, none at the end, and only letters, "
    "digits, dot, underscore and hyphen in the names",
)
PATH_IS_STRAIGHT: Final = Rule(
    f"!self.matches({quote(_DOTS)})", "write the path without . and .. as names: it must lead where it seems to lead"
)
PATH_IS_NOT_THE_SYSTEMS: Final = Rule(
    f"!self.matches({quote(_SYSTEM)})",
    "choose a directory for this pool alone, such as /mnt/nvme/kv or /var/lib/kvpool/chat: this one belongs to the "
    "system, and the pool takes ownership of its directory",
)


def host_path(*more: Rule) -> Any:
    """Field type: a directory on a node that a pool can own."""

    def check(value: str) -> str:
        PATH_IS_CLEAN.check(re.fullmatch(_CLEAN, value) is not None)
        PATH_IS_STRAIGHT.check(re.search(_DOTS, value) is None)
        PATH_IS_NOT_THE_SYSTEMS.check(re.search(_SYSTEM, value) is None)
        return value

    extra = with_rules(PATH_IS_CLEAN, PATH_IS_STRAIGHT, PATH_IS_NOT_THE_SYSTEMS, *more)
    return Annotated[str, Field(min_length=1, max_length=180, json_schema_extra=extra), AfterValidator(check)]


def matching(form: str, max_length: int, what: str, *more: Rule, min_length: int = 1) -> Any:
    """Field type: a string that matches an anchored pattern, valid for RE2 and Python."""
    rule = Rule(f"self.matches({quote(form)})", what)

    def check(value: str) -> str:
        rule.check(re.fullmatch(form, value) is not None)
        return value

    extra = with_rules(rule, *more)
    kind = Annotated[str, Field(max_length=max_length, json_schema_extra=extra), AfterValidator(check)]
    return Annotated[kind, Field(min_length=min_length)] if min_length else kind


def refined(kind: Any, check: Callable[[str], str]) -> Any:
    """Field type `kind` with one more check in Python: that of a rule in its schema."""
    return Annotated[kind, AfterValidator(check)]


def name(max_length: int, what: str) -> Any:
    """Field type: a DNS label that can be part of a volume name."""
    return matching(rf"^[a-z]([-a-z0-9]{{0,{max_length - 2}}}[a-z0-9])?$", max_length, what)


def count_or_percent(what: str) -> Any:
    """Field type: a count of nodes from 1 to 1000, or a percentage from 1% to 100%."""
    percent = r"^([1-9][0-9]?|100)%$"
    rule = Rule(
        f"type(self) == int ? self >= 1 && self <= 1000 : string(self).matches({quote(percent)})",
        what,
    )

    def check(value: int | str) -> int | str:
        if isinstance(value, int):
            rule.check(not isinstance(value, bool) and 1 <= value <= 1000)
        else:
            rule.check(re.fullmatch(percent, value, re.ASCII) is not None)
        return value

    extra = with_rules(rule, **{"x-kubernetes-int-or-string": True, "maxLength": 4})
    return Annotated[int | str, Field(json_schema_extra=extra), AfterValidator(check)]


def reserve(what: str) -> Any:
    """Field type: a percentage from 0% to 90%, or a quantity of bytes from 1Mi to 1Pi, as a string."""
    percent = r"^([0-9]|[1-8][0-9]|90)%$"
    rule = Rule(
        f"self.matches({quote(percent)}) || (isQuantity(self) && !quantity(self).isLessThan(quantity('1Mi')) && "
        "!quantity(self).isGreaterThan(quantity('1Pi')))",
        what,
    )

    def check(value: str) -> str:
        try:
            fits = re.fullmatch(percent, value, re.ASCII) is not None or 1 << 20 <= quantity.to_bytes(value) <= 1 << 50
        except ValueError:
            fits = False
        rule.check(fits)
        return value

    return Annotated[str, Field(max_length=32, json_schema_extra=with_rules(rule)), AfterValidator(check)]
