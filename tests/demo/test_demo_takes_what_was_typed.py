"""`make demo` must not meet a cluster that nobody named, nor empty a folder that no demo has made."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))

from hack.demo import demo  # noqa: E402
from hack.demo.out_folder import DEFAULT, MARK, make_anew  # noqa: E402
from hack.demo.settings import DemoError  # noqa: E402

FROM_ELSEWHERE = {"CONTEXT": "production", "STORE": "s3://theirs", "REGISTRY": "registry.example.com"}


def recipe(*words: str, **variables: str) -> list[str]:
    """Commands of `make -n demo WORDS`, which runs none of them."""
    outer = {
        name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "ARGS"))
    }
    done = subprocess.run(
        ["make", "-n", "demo", *words], cwd=ROOT, env={**outer, **variables}, capture_output=True, text=True, check=True
    )  # fmt: skip
    return done.stdout.replace("\\\n", " ").splitlines()


def test_context_store_and_registry_of_the_environment_are_not_the_demo_s() -> None:
    commands = recipe(**FROM_ELSEWHERE)
    assert shlex.split(commands[-1]) == [".venv/bin/python", "hack/demo"]
    assert any(command.endswith("hack/setup.sh") for command in commands), "the local cluster needs more"
    mixed = shlex.split(recipe("CONTEXT=my lab", "ARGS=--gpus 0", **FROM_ELSEWHERE)[-1])
    assert mixed[1:] == ["hack/demo", "--context", "my lab", "--gpus", "0"]


def test_what_is_typed_behind_make_demo_is_the_demo_s() -> None:
    commands = recipe("CONTEXT=lab", "STORE=s3://bucket/p", "REGISTRY=r.example.com/team")
    typed = ["--context", "lab", "--store", "s3://bucket/p", "--registry", "r.example.com/team"]
    assert shlex.split(commands[-1])[1:] == ["hack/demo", *typed]
    assert any(command.endswith("hack/setup.sh python") for command in commands), "no root is needed there"


def test_a_folder_with_somebody_s_files_is_refused_and_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "results"
    results.mkdir()
    (results / "thesis.txt").write_text("years of work")
    needed = ["--context", "lab", "--store", "s3://b/p", "--registry", "r"]
    assert demo.main([*needed, "--out", str(results)]) == 1
    assert f"--out {results} is not empty and no demo has made it" in capsys.readouterr().err
    assert (results / "thesis.txt").read_text() == "years of work"
    with pytest.raises(DemoError, match="no demo has made it"):
        make_anew(results / "thesis.txt")


def test_a_folder_that_a_demo_has_made_is_emptied_and_an_empty_or_new_one_is_taken(tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"
    make_anew(out)
    (out / "report.json").write_text("{}")
    make_anew(out)
    assert [path.name for path in out.iterdir()] == [MARK]
    empty = tmp_path / "empty"
    empty.mkdir()
    make_anew(empty)
    assert (empty / MARK).is_file()
    assert DEFAULT == ROOT / "demo-out"
