"""What the API server would refuse is refused without one, in the same words."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from refused_specs import REFUSED

from rtj_operator.admission import HOLDS, RULES, RefusedError, admit
from rtj_operator.crd import root_schema

Raw = Callable[[str], dict[str, Any]]
ITS_OWN_WORDS = (
    "equal to 1",
    "equal to 2",
    "Required value",
    "supported values",
    "unknown field",
    "'*' for any",
)
"""Of the API server's machinery, or said here by the models before a rule is asked."""


@pytest.mark.parametrize("case", REFUSED)
def test_a_bad_spec_is_refused_with_the_sentence_of_the_definition(raw_job: Raw, case: str) -> None:
    change, sentence = REFUSED[case]
    raw = raw_job("smallest")
    change(raw)
    with pytest.raises(RefusedError) as refused:
        admit(raw)
    assert sentence in str(refused.value) or any(words in sentence for words in ITS_OWN_WORDS)


@pytest.mark.parametrize("name", ["smallest", "full"])
def test_good_jobs_are_admitted(raw_job: Raw, name: str) -> None:
    raw = raw_job(name)
    assert admit(raw).metadata.name == raw["metadata"]["name"]


def rules(schema: Any) -> Iterator[str]:
    for child in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        yield from rules(child)
    if isinstance(schema, dict):
        yield from (rule["rule"] for rule in schema.get(RULES, ()))


def test_every_rule_that_looks_at_one_object_is_known() -> None:
    alone = {rule for rule in rules(root_schema()) if "oldSelf" not in rule}
    assert {rule for rule in alone if ".matches(" not in rule} == set(HOLDS)


@pytest.mark.parametrize(
    ("queue", "taken"),
    [
        ("gpus", True), ("team.gpus", True), ("a-1.b-2.c", True), ("a" * 63, True),
        ("a" * 64, False), ("team..gpus", False), (".gpus", False), ("gpus.", False), ("Team", False),
        ("team-.gpus", False), ("", False),
    ],
)  # fmt: skip
def test_a_queue_is_named_as_kueue_names_one_and_fits_a_label(raw_job: Raw, queue: str, taken: bool) -> None:
    raw = raw_job("smallest")
    raw["spec"]["scheduling"] = {"queue": queue}
    if taken:
        assert admit(raw).spec.scheduling.queue == queue
    else:
        with pytest.raises(RefusedError, match="queue"):
            admit(raw)
