"""What a rank wrote last stands in the status, whatever it is: the API server reads a status as YAML."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest
import yaml

from rtj_operator.kube import RTJ, ApiServer, as_yaml

ODD = [
    "GLHF! \N{BEACH WITH UMBRELLA}\ufe0f",
    r"a literal \ud83c\udfd6 of somebody",
    "\x00\x07\x1b[31m\x7f\x85\x9f",
    "\u2028\u2029\ufeff\ufffe\uffff",
    "tabs\tand\nlines: - [x] {y} # no comment 'quoted' \"twice\"",
]


@pytest.mark.parametrize("text", ODD)
def test_text_of_a_rank_is_the_same_as_json_and_as_yaml_without_an_escaped_surrogate(text: str) -> None:
    sent = as_yaml({"status": {"message": text, "n": 1, "none": None}})
    assert not re.search(r"(?<!\\)(\\\\)*\\ud[89a-f]", sent), "Kubernetes refuses the whole status for it"
    for read in (json.loads(sent), yaml.safe_load(sent)):
        assert read == {"status": {"message": text, "n": 1, "none": None}}


def test_half_a_character_becomes_a_replacement_character() -> None:
    assert json.loads(as_yaml({"a": "\ud83c!"})) == {"a": "\ufffd!"}


def test_a_status_is_sent_as_that_text() -> None:
    sent: list[Any] = []

    class Recording(ApiServer):
        async def _call(self, *words: Any) -> Any:
            sent.append(words)
            return {}

    server = Recording(client=None, timeout=1.0)  # type: ignore[arg-type]
    asyncio.run(server.write_status(RTJ, "ns", "job", {"message": ODD[0]}, uid="u", resource_version="1"))
    *_, body, content_type = sent[0]
    assert ODD[0] in body
    assert content_type.startswith("application/apply-patch+yaml;")
