"""The generated definition: fresh, structural, and every field explained."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rtj_operator import crd

ROOT = Path(__file__).resolve().parents[2]


def nodes(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            yield from nodes(schema[key], f"{path}[]")


SCHEMA = crd.root_schema()


def test_the_files_in_the_repository_are_what_the_models_say() -> None:
    assert crd.stale(ROOT) == [], "run `python -m rtj_operator.crd --write`"


def test_check_fails_on_a_stale_file_and_names_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    crd.write(tmp_path)
    assert crd.main(["--check", "--root", str(tmp_path)]) == 0
    (tmp_path / crd.JOB.targets[0]).write_text("old", encoding="utf-8")
    assert crd.main(["--check", "--root", str(tmp_path)]) == 1
    assert crd.JOB.targets[0] in capsys.readouterr().err


def test_the_schema_is_structural() -> None:
    for path, node in nodes(SCHEMA):
        assert not {"$ref", "title", "const", "allOf", "oneOf", "exclusiveMinimum", "uniqueItems"} & set(
            node
        ), path
        typed = "type" in node or node.get("x-kubernetes-int-or-string")
        assert typed, f"{path} has no type"
        assert "anyOf" not in node or node.get("x-kubernetes-int-or-string"), path
        assert node.get("additionalProperties") is not True, path


def test_every_field_is_explained() -> None:
    for path, node in nodes(SCHEMA):
        leaf = path.rsplit(".", 1)[-1]
        if path and not leaf.endswith("[]") and leaf not in ("apiVersion", "kind", "metadata"):
            assert node.get("description"), path


def test_every_rule_has_a_sentence_that_names_its_field() -> None:
    found = [(p, r) for p, n in nodes(SCHEMA) for r in n.get("x-kubernetes-validations", [])]
    assert len(found) >= 15
    for path, rule in found:
        assert len(rule["message"].split()) >= 6, path
        assert rule["reason"].startswith("FieldValue")


def test_everything_that_a_rule_reads_is_bounded() -> None:
    for path, node in nodes(SCHEMA["properties"]["spec"]):
        if node.get("type") == "array":
            assert "maxItems" in node, path
        if node.get("type") == "string" and "enum" not in node:
            assert "maxLength" in node, path


@pytest.mark.parametrize("resource", crd.RESOURCES, ids=lambda r: r.kind)
def test_every_number_of_a_spec_has_a_least_and_a_most(resource: crd.Resource) -> None:
    """2**60 seconds is more than a clock can add to its time: an operator that tries ends in an exception."""
    spec = crd.root_schema(resource)["properties"]["spec"]
    unbounded = [
        p for p, n in nodes(spec) if n.get("type") == "integer" and not {"minimum", "maximum"} <= set(n)
    ]
    assert not unbounded


def test_defaults_are_said_and_only_those_of_the_scale_subresource_are_stored() -> None:
    stored = [p for p, n in nodes(SCHEMA) if "default" in n]
    assert stored == [".spec.suspend", ".spec.nodes"]
    steps = SCHEMA["properties"]["spec"]["properties"]["checkpoint"]["properties"]["intervalSteps"]
    assert steps["description"].endswith("Default: 500.")


def test_a_status_write_is_never_refused_for_a_missing_field() -> None:
    required = [p for p, n in nodes(SCHEMA["properties"]["status"]) if n.get("required")]
    assert required == [".conditions[]"]


def test_columns_read_fields_that_exist() -> None:
    for name, _kind, path, _priority, _text in crd.COLUMNS:
        if path.startswith(".metadata"):
            continue
        node = SCHEMA
        for part in path.strip(".").split("."):
            assert part in node["properties"], name
            node = node["properties"][part]


def test_the_definition_stays_small_enough_to_apply() -> None:
    assert len(crd.render()) < 100_000
    assert re.match(r"^# Generated", crd.render())
