"""The chart's values: their comments become a table, their types a JSON schema that helm checks every value against.

A comment describes the key below it. Maps with keys are closed, so that a misspelt value is refused and not ignored; an
empty map or list takes what Kubernetes takes there. Texts that the operator checks at its start have its patterns.
"""

import json
from dataclasses import dataclass
from typing import Any

import yaml

from rtj_operator import flags

_CHOICES = {
    "pullPolicy": ["Always", "IfNotPresent", "Never"],
    "logLevel": ["DEBUG", "INFO", "WARNING", "ERROR"],
}
_OPEN = {"resources", "labels"}
"""Maps whose keys are the user's although the defaults name some."""
_STRINGS = {"namespaces", "allowedSecrets", "allowedUrls", "allowedEndpoints"}
_QUANTITY = {"type": ["string", "number"], "pattern": flags.QUANTITY, "exclusiveMinimum": 0}
_IMAGES = ("image", "sidecarImage")


def _text(pattern: str, *, empty: bool = False) -> dict[str, Any]:
    return {"type": "string", "pattern": f"^$|{pattern}" if empty else pattern}


_FORMS: dict[str, dict[str, Any]] = {
    **{f"{image}.repository": _text(flags.REPOSITORY) for image in _IMAGES},
    **{f"{image}.tag": _text(flags.TAG, empty=True) for image in _IMAGES},
    **{f"{image}.digest": _text(flags.DIGEST, empty=True) for image in _IMAGES},
    **{f"sidecar.{name}": _QUANTITY for name in ("cpu", "cpuLimit", "memory")},
    "trainer.python": _text(r"^[^\s]+$"),
    "namespaces[]": _text(flags.NAMESPACE),
    "store.endpoint": _text(flags.ENDPOINT, empty=True),
    "store.region": _text(flags.REGION, empty=True),
    "store.secretName": _text(flags.OBJECT_NAME),
    "store.allowedSecrets[]": _text(flags.OBJECT_NAME),
    "store.allowedUrls[]": _text(flags.URL_PREFIX),
    "store.allowedEndpoints[]": _text(flags.ENDPOINT),
    "faultInjection.existingSecret": _text(flags.OBJECT_NAME, empty=True),
    "priorityClassName": _text(flags.OBJECT_NAME, empty=True),
    "metricsPort": {"type": "integer", "minimum": 1, "maximum": 65535},
    "monitoring.podMonitor.interval": _text(r"^([0-9]+(ms|s|m|h|d))+$"),
}
"""By path; `[]` stands for each entry of a list."""
_TYPES = {bool: "boolean", int: "integer", str: "string", list: "array", dict: "object"}


@dataclass(frozen=True)
class Value:
    """One key of values.yaml."""

    path: str
    text: str
    default: Any


def values(source: str) -> list[Value]:
    """Every leaf of the file with the comment above it. Raises ValueError for one that nothing describes."""
    found: list[Value] = []
    tree: dict[str, Any] = yaml.safe_load(source)
    keys: list[str] = []
    comment: list[str] = []
    depths: list[int] = []
    texts: dict[str, str] = {}
    for line in source.splitlines():
        bare = line.strip()
        if not bare:
            comment = []
        elif bare.startswith("#"):
            comment.append(bare.lstrip("# "))
        else:
            depth = len(line) - len(line.lstrip())
            while depths and depths[-1] >= depth:
                depths.pop()
                keys.pop()
            depths.append(depth)
            keys.append(bare.split(":")[0])
            texts[".".join(keys)] = " ".join(comment)
            comment = []
    for path, default in _leaves(tree, ""):
        if not texts[path]:
            raise ValueError(f"values.yaml: no comment says what {path} does")
        found.append(Value(path, texts[path], default))
    return found


def _leaves(tree: dict[str, Any], prefix: str) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict) and value and key not in _OPEN:
            found += _leaves(value, f"{path}.")
        else:
            found.append((path, value))
    return found


def page(source: str) -> str:
    """The table of all values."""
    rows = [f"| `{v.path}` | `{json.dumps(v.default)}` | {v.text} |" for v in values(source)]
    head = [
        "# Values of the chart",
        "",
        "Generated from `charts/rtj-operator/values.yaml` by `make generate`. Any other value is refused.",
        "",
        "| value | default | what it does |",
        "| --- | --- | --- |",
    ]
    return "\n".join([*head, *rows, ""])


def schema(source: str) -> str:
    """JSON schema (draft 7) of the values."""
    body = {"$schema": "http://json-schema.org/draft-07/schema#", **_schema(yaml.safe_load(source), "")}
    body["properties"]["global"] = {"type": "object"}
    return json.dumps(body, indent=2) + "\n"


def _schema(tree: dict[str, Any], prefix: str) -> dict[str, Any]:
    properties = {key: _property(key, value, f"{prefix}{key}") for key, value in tree.items()}
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _property(key: str, value: Any, path: str) -> dict[str, Any]:
    if path in _FORMS:
        return _FORMS[path]
    if key in _CHOICES:
        return {"enum": _CHOICES[key]}
    if isinstance(value, dict) and value and key not in _OPEN:
        return _schema(value, f"{path}.")
    if key in _STRINGS:
        return {"type": "array", "items": _FORMS.get(f"{path}[]", {"type": "string"})}
    if isinstance(value, int) and not isinstance(value, bool):
        return {"type": "integer", "minimum": 0}
    return {"type": _TYPES[type(value)]}
