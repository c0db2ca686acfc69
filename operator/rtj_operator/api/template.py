"""`spec.template`: the user's own pod template, kept as it is, and the few things in it that we read.

The schema is partial with unknown fields preserved (O15): a full pod schema would make a CRD of 1.2 MB. What CEL
rules read is declared. Typos inside are found by a server dry run of Job and pod, not here.
"""

from collections.abc import Mapping
from typing import Annotated, TypeAlias

from pydantic import WithJsonSchema

from rtj_operator.api.base import JsonObject, cel, dig
from rtj_operator.api.names import TRAINER_CONTAINER

_OPEN = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
_CONTAINER = {
    **_OPEN,
    "description": "A container as in a pod; everything of it is kept.",
    "required": ["name"],
    "properties": {"name": {"type": "string", "maxLength": 63, "description": "Name of the container."}},
}
_SCHEMA: JsonObject = {
    **_OPEN,
    "required": ["spec"],
    "properties": {
        "metadata": {**_OPEN, "description": "Labels and annotations of the pods."},
        "spec": {
            **_OPEN,
            "description": "Pod spec, as in any pod template.",
            "required": ["containers"],
            "properties": {
                "containers": {
                    "type": "array",
                    "minItems": 1,
                    "maxItems": 32,
                    "description": "Containers of the pod. One is named trainer.",
                    "items": _CONTAINER,
                }
            },
        },
    },
    "x-kubernetes-validations": [
        cel(
            f"self.spec.containers.exists(c, c.name == '{TRAINER_CONTAINER}')",
            f"template.spec.containers must hold a container named {TRAINER_CONTAINER}: its command is what "
            f"torchrun runs",
            reason="FieldValueRequired",
        )
    ],
}

PodTemplate: TypeAlias = Annotated[JsonObject, WithJsonSchema(_SCHEMA)]


def containers(template: Mapping[str, object], field: str = "containers") -> list[JsonObject]:
    """Containers (or `initContainers`) of a template; an empty list where there are none."""
    found = dig(template, "spec", field)
    return [c for c in found if isinstance(c, dict)] if isinstance(found, list) else []


def trainer(template: Mapping[str, object]) -> JsonObject | None:
    """The container named trainer, or None."""
    return next((c for c in containers(template) if c.get("name") == TRAINER_CONTAINER), None)


def words(container: Mapping[str, object]) -> list[str]:
    """Command and arguments of a container as one list."""
    found: list[str] = []
    for field in ("command", "args"):
        part = container.get(field)
        found += [str(word) for word in part] if isinstance(part, list) else []
    return found


def extended_resources(container: Mapping[str, object]) -> dict[str, int]:
    """Extended resources (nvidia.com/gpu, ...) in a container's limits, in name order. A count that is no number is
    0."""
    limits = dig(container, "resources", "limits")
    if not isinstance(limits, Mapping):
        return {}
    named = sorted(n for n in limits if "/" in n and not n.split("/")[0].endswith("kubernetes.io"))
    return {n: _count(limits[n]) for n in named}


def _count(value: object) -> int:
    text = str(value)
    return int(text) if text.isascii() and text.isdigit() else 0
