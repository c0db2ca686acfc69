"""Base classes and scalar types of the custom resource, so that casing, strictness and CEL are decided in one place.

An attribute's docstring is its description in `kubectl explain`. No sets, tuples or `gt=`: structural schemas have
none.
"""

import math
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from typing import Annotated, Any, TypeAlias

from annotated_types import Le
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)
from pydantic.alias_generators import to_camel

JsonObject: TypeAlias = dict[str, Any]
"""A JSON object as it comes from and goes to the API server."""

MOST_SECONDS = 10 * 365 * 86400
"""Ten years: more than any job lives, and every clock can add it to its time."""
MOST_STEPS = 10**12 - 1
"""As many digits as a checkpoint's name has for its step."""
MOST_BYTES = 2**50
AS_WRITTEN = "as written"
"""Context of a validation that shall refuse what is above a cap, as the API server does."""
MOST_COUNT = 2**31 - 1
"""Of samples in a batch, and of versions."""
_CAPS = frozenset({MOST_SECONDS, MOST_STEPS, MOST_BYTES, MOST_COUNT})


class ApiModel(BaseModel):
    """Immutable part of the resource: camelCase in JSON, snake_case in Python."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        frozen=True,
        extra="ignore",
        protected_namespaces=(),
        use_attribute_docstrings=True,
    )

    def to_dict(self) -> JsonObject:
        """JSON-ready dict in camelCase without absent fields, and without numbers that JSON has not (inf, NaN): with
        one of those the API server refuses the whole body, again and again."""
        return _finite(self.model_dump(mode="json", by_alias=True, exclude_none=True))


def _finite(body: JsonObject) -> JsonObject:
    return {k: _inside(v) for k, v in body.items() if not _no_number(v)}


def _inside(value: Any) -> Any:
    if isinstance(value, dict):
        return _finite(value)
    return [_inside(v) for v in value if not _no_number(v)] if isinstance(value, list) else value


def _no_number(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


class SpecModel(ApiModel):
    """Part of the spec. Fields that it does not know are kept, so that they can be reported and not lost silently."""

    model_config = ConfigDict(extra="allow")

    @model_validator(mode="before")
    @classmethod
    def _as_much_as_counts(cls, value: Any, info: ValidationInfo) -> Any:
        """Objects that were stored before a field had its cap are read with the cap: nothing tells the two apart."""
        if not isinstance(value, Mapping) or info.context == AS_WRITTEN:
            return value
        capped = {key: most for key, most in _caps_of(cls) if _above(value.get(key), most)}
        return {**value, **capped} if capped else value


@cache
def _caps_of(model: type[BaseModel]) -> tuple[tuple[str, int], ...]:
    """(name in JSON or in Python, cap) of the fields that have one of the caps above."""
    found = [
        (name, bound.le)
        for name, info in model.model_fields.items()
        for bound in info.metadata
        if isinstance(bound, Le) and isinstance(bound.le, int) and bound.le in _CAPS
    ]
    return tuple((key, most) for name, most in found for key in (name, to_camel(name)))


def _above(value: object, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > most


def cel(
    rule: str, message: str, *, message_expression: str | None = None, reason: str = "FieldValueInvalid"
) -> JsonObject:
    """One CEL rule with its sentence, as apiextensions v1 writes it."""
    value: JsonObject = {"rule": rule, "message": message, "reason": reason}
    if message_expression is not None:
        value["messageExpression"] = message_expression
    return value


def rules(*validations: JsonObject, **extra: Any) -> JsonObject:
    """`json_schema_extra` that carries CEL rules, and whatever else the schema needs."""
    return {"x-kubernetes-validations": list(validations), **extra}


def _as_text(value: object) -> object:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


Quantity: TypeAlias = Annotated[
    str,
    BeforeValidator(_as_text),
    WithJsonSchema(
        {
            "x-kubernetes-int-or-string": True,
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "maxLength": 32,
            "x-kubernetes-validations": [
                cel(
                    "isQuantity(string(self)) && quantity(string(self)).isGreaterThan(quantity('0'))",
                    "must be a quantity above 0, as in 64Gi",
                )
            ],
        }
    ),
]
"""A Kubernetes quantity; text here, integer or text in YAML (O18)."""

Fraction: TypeAlias = Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+)?$", max_length=16)]
"""A number that is not whole, written as text: Kubernetes' API has no floats in specs (O18)."""


def _timestamp(value: datetime) -> str:
    return value.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


Timestamp: TypeAlias = Annotated[
    datetime,
    PlainSerializer(_timestamp, return_type=str),
    WithJsonSchema({"type": "string", "format": "date-time"}),
]
"""RFC 3339 in UTC, whole seconds, as metav1.Time writes it."""


def _micro_time(value: datetime) -> str:
    return value.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


MicroTime: TypeAlias = Annotated[
    datetime,
    PlainSerializer(_micro_time, return_type=str),
    WithJsonSchema({"type": "string", "format": "date-time"}),
]
"""RFC 3339 in UTC with microseconds, where seconds between two of them are shown."""


def unknown_fields(model: BaseModel, path: str) -> list[str]:
    """Paths of all fields below `model` that no model declares, in document order."""
    found = [f"{path}.{name}" for name in (model.model_extra or {})]
    for name, info in type(model).model_fields.items():
        found += _unknown_in(getattr(model, name), f"{path}.{info.alias or name}")
    return found


def _unknown_in(value: object, path: str) -> list[str]:
    if isinstance(value, BaseModel):
        return unknown_fields(value, path)
    if isinstance(value, list):
        return [p for i, item in enumerate(value) for p in _unknown_in(item, f"{path}[{i}]")]
    return []


def dig(value: object, *keys: str) -> Any:
    """Value below nested mappings, or None where one is missing or is no mapping. Templates are the user's own JSON."""
    for key in keys:
        if not isinstance(value, Mapping):
            return None
        value = value.get(key)
    return value
