"""What the API server will say of an object, for who has none at hand: `rtj plan` asks before anything is applied.

The definition's own sentences are used; a test holds that every CEL rule of it has its like here. Pure.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from rtj_operator.api.base import AS_WRITTEN, JsonObject, dig, unknown_fields
from rtj_operator.api.job import ResumableTrainingJob, path_of
from rtj_operator.api.names import MAX_NAME_LENGTH, TRAINER_CONTAINER
from rtj_operator.api.quantity import parse_quantity
from rtj_operator.api.template import trainer
from rtj_operator.crd import JOB, root_schema

RULES = "x-kubernetes-validations"
_FORMAT = re.compile(r"^'(.*)'\.format\(\[(.*)\]\)$", re.DOTALL)
_MATCHES = re.compile(r"^(self[.\w]*)\.matches\('(.*)'\)$")


class RefusedError(ValueError):
    """The API server would not take the object. The message has one line for each reason."""


def admit(raw: JsonObject) -> ResumableTrainingJob:
    """The job that the API server would store. Raises RefusedError naming every field that it would refuse.

    As strict as it is: "64" is no integer and 0.05 no text.
    """
    shown = {name: value for name, value in raw.items() if name != "status"}
    try:
        job = ResumableTrainingJob.model_validate_json(
            json.dumps(shown, default=str), strict=True, context=AS_WRITTEN
        )
    except ValidationError as exc:
        raise RefusedError(
            "\n".join(f"{path_of(e['loc'])}: {e['msg']}" for e in exc.errors(include_url=False))
        ) from exc
    unknown = [f"unknown field {path}" for path in unknown_fields(job.spec, "spec")]
    stored = {**shown, "spec": {"nodes": job.spec.nodes, **shown["spec"]}}
    if found := unknown + list(_broken(root_schema(JOB), stored, "")):
        raise RefusedError("\n".join(found))
    return job


def _broken(schema: JsonObject, value: Any, path: str) -> Iterator[str]:
    """Sentences of the rules that do not hold at `value` and below it, in the schema's order."""
    for rule in schema.get(RULES, ()):
        if "oldSelf" not in rule["rule"] and not _holds(rule["rule"], value):
            yield f"{path}: {_sentence(rule, value)}".removeprefix(": ")
    if isinstance(value, Mapping):
        known, rest = schema.get("properties", {}), schema.get("additionalProperties")
        for name, child in value.items():
            below = known.get(name) or rest
            if isinstance(below, dict) and child is not None:
                yield from _broken(below, child, f"{path}.{name}".lstrip("."))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _broken(schema.get("items", {}), item, f"{path}[{index}]")


def _holds(rule: str, value: Any) -> bool:
    """Whether a CEL rule of the definition holds for `value`. Raises KeyError for one that has no like here."""
    pattern = _MATCHES.match(rule)
    if pattern is None:
        return HOLDS[rule](value)
    path, wanted = pattern.groups()
    return re.search(wanted.removesuffix("$") + r"\Z", dig(value, *path.split(".")[1:])) is not None


def _sentence(rule: Mapping[str, str], value: Any) -> str:
    """The rule's `messageExpression` where it has one: a format and the paths of what is put into it."""
    made = _FORMAT.match(rule.get("messageExpression", ""))
    if made is None:
        return rule["message"]
    text, paths = made.groups()
    return text % tuple(dig(value, *path.strip().split(".")[1:]) for path in paths.split(","))


def _at_most(low: tuple[str, ...], high: tuple[str, ...]) -> Callable[[Any], bool]:
    """Holds where one of the two numbers is absent, or the first one is not above the second."""

    def holds(value: Any) -> bool:
        first, second = dig(value, *low), dig(value, *high)
        return first is None or second is None or bool(first <= second)

    return holds


def _any_of(*names: str) -> Callable[[Any], bool]:
    return lambda value: any(value.get(name) is not None for name in names)


def _sizes_in_range(elastic: Any) -> bool:
    low, high = elastic.get("minNodes"), elastic.get("maxNodes")
    return all((low is None or n >= low) and (high is None or n <= high) for n in elastic.get("sizes") or ())


def _nodes_listed(spec: Any) -> bool:
    sizes = dig(spec, "elastic", "sizes")
    return sizes is None or spec.get("nodes", 1) in sizes


def _amount(value: Any) -> bool:
    try:
        return parse_quantity(value) > 0
    except ValueError:
        return False


def _star_or_count(value: Any) -> bool:
    return value >= 1 if isinstance(value, int) else value == "*"


HOLDS: Mapping[str, Callable[[Any], bool]] = {
    f"size(self.metadata.name) <= {MAX_NAME_LENGTH}": lambda job: (
        len(job["metadata"]["name"]) <= MAX_NAME_LENGTH
    ),
    "!has(self.elastic) || !has(self.elastic.minNodes) || self.elastic.minNodes <= self.nodes": _at_most(
        ("elastic", "minNodes"), ("nodes",)
    ),
    "!has(self.elastic) || !has(self.elastic.maxNodes) || self.nodes <= self.elastic.maxNodes": _at_most(
        ("nodes",), ("elastic", "maxNodes")
    ),
    "!has(self.elastic) || !has(self.elastic.sizes) || self.nodes in self.elastic.sizes": _nodes_listed,
    "!has(self.maxNodes) || !has(self.minNodes) || self.minNodes <= self.maxNodes": _at_most(
        ("minNodes",), ("maxNodes",)
    ),
    "!has(self.sizes) || self.sizes.all(n, (!has(self.minNodes) || n >= self.minNodes) && "
    "(!has(self.maxNodes) || n <= self.maxNodes))": _sizes_in_range,
    "type(self) == int ? self >= 1 : self == '*'": _star_or_count,
    "!(has(self.intervalSteps) && self.intervalSteps == 0 && has(self.intervalSeconds) && "
    "self.intervalSeconds == 0)": lambda point: (
        point.get("intervalSteps") != 0 or point.get("intervalSeconds") != 0
    ),
    "!(has(self.adopt) && self.adopt && has(self.resumeFrom))": lambda point: (
        not point.get("adopt") or point.get("resumeFrom") is None
    ),
    "isQuantity(string(self)) && quantity(string(self)).isGreaterThan(quantity('0'))": _amount,
    "!has(self.backoffSeconds) || !has(self.maxBackoffSeconds) || self.backoffSeconds <= "
    "self.maxBackoffSeconds": _at_most(("backoffSeconds",), ("maxBackoffSeconds",)),
    "has(self.causes) || has(self.exitCodes) || has(self.logPattern)": _any_of(
        "causes", "exitCodes", "logPattern"
    ),
    "has(self.everyCommits) || has(self.everySeconds)": _any_of("everyCommits", "everySeconds"),
    f"self.spec.containers.exists(c, c.name == '{TRAINER_CONTAINER}')": lambda template: (
        trainer(template) is not None
    ),
}
"""Each CEL rule of the definition that looks at one object alone, by its text."""
