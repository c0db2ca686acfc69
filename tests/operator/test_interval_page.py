"""The numbers of docs/interval.md are those that its sample prints, and its YAML is what the API takes."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import yaml

from rtj_operator.api import Checkpoint, CheckpointInterval, IntervalPolicy
from trainer_sidecar.kube_commands.words import interval_words

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "interval.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)


def test_the_sample_prints_what_stands_below_it() -> None:
    (sample,) = blocks("python")
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile(sample, "interval.md", "exec"), {})
    assert said.getvalue() == blocks("text")[-1]


def test_the_job_is_one_that_the_api_takes() -> None:
    (text,) = blocks("yaml")
    found = Checkpoint.model_validate(yaml.safe_load(text)["spec"]["checkpoint"])
    assert (found.interval_policy, found.interval_seconds) == (IntervalPolicy.AUTO, 1800)


def test_the_line_of_kubectl_rtj_is_of_the_same_example() -> None:
    shown = " ".join(blocks("text")[0].split()).removeprefix("interval: ")
    numbers = CheckpointInterval(
        policy=IntervalPolicy.AUTO,
        seconds=646,
        steps=1292,
        advised_seconds=646,
        save_cost_seconds=3,
        mtbf_seconds=69429,
        restart_seconds=90,
        wasted_fraction=0.0112,
    )
    assert shown == interval_words(numbers)
