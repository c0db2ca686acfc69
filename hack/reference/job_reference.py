"""Every field of a ResumableTrainingJob, from the definition that the API server checks, and its status's words."""

import json
from collections.abc import Iterator
from typing import Any

from rtj_operator.conditions import CONDITION_DOCS, EVENT_DOCS, Reason
from rtj_operator.crd import DRILL, JOB, Resource, root_schema
from rtj_operator.drills.words import DRILL_REASON_DOCS

Schema = dict[str, Any]


def page(resource: Resource = JOB) -> str:
    """Spec and status as two tables."""
    schema = root_schema(resource)["properties"]
    return "\n".join(
        [
            f"# {resource.kind}",
            "",
            f"Generated from the models by `make generate`. `kubectl explain {resource.short}.spec` says the same.",
            "",
            "## spec",
            "",
            *_table(schema["spec"], "spec"),
            "",
            "## status",
            "",
            *_table(schema["status"], "status"),
            "",
        ]
    )


def drill_page() -> str:
    """The same for drills, with their reasons."""
    reasons = [f"| `{r.value}` | {text} |" for r, text in DRILL_REASON_DOCS.items()]
    head = ("## Reasons", "", "What its sandbox waits for has the words of jobs (events.md).", "")
    return "\n".join([page(DRILL), *head, "| reason | meaning |", "| --- | --- |", *reasons, ""])


def words() -> str:
    """Conditions, their reasons, and Events."""
    conditions = [f"| `{c.value}` | {text} |" for c, text in CONDITION_DOCS.items()]
    events = [f"| `{e.value}` | {text} |" for e, text in EVENT_DOCS.items()]
    reasons = ", ".join(f"`{r.value}`" for r in Reason)
    return "\n".join(
        [
            "# Conditions and events",
            "",
            "Generated from the code by `make generate`. A word may be added, none ever gets another meaning.",
            "",
            *("## Conditions", "", "| type | meaning |", "| --- | --- |", *conditions, ""),
            *("Reasons, in conditions and in `status.reason`: " + reasons + ".", ""),
            *("## Events", "", "| reason | what it tells |", "| --- | --- |", *events, ""),
        ]
    )


def _table(schema: Schema, prefix: str) -> list[str]:
    rows = ["| field | type | default | meaning |", "| --- | --- | --- | --- |"]
    for path, field in _fields(schema, prefix):
        default = f"`{json.dumps(field['default'])}`" if "default" in field else ""
        text = field.get("description", "").replace("\n", " ").replace("|", "\\|")
        rows.append(f"| `{path}` | {_type(field)} | {default} | {text} |")
    return rows


def _fields(schema: Schema, prefix: str) -> Iterator[tuple[str, Schema]]:
    for name, field in schema.get("properties", {}).items():
        path = f"{prefix}.{name}"
        yield path, field
        if field.get("type") == "array":
            yield from _fields(field.get("items", {}), f"{path}[]")
        else:
            yield from _fields(field, path)


def _type(field: Schema) -> str:
    if "enum" in field:
        return " \\| ".join(f"`{value}`" for value in field["enum"])
    if field.get("x-kubernetes-int-or-string"):
        return "integer or string"
    if field.get("type") == "array":
        return f"list of {field.get('items', {}).get('type', 'any')}"
    bounds = [f"{sign} {field[key]}" for key, sign in (("minimum", "≥"), ("maximum", "≤")) if key in field]
    return ", ".join([field.get("type", "any"), *bounds])
