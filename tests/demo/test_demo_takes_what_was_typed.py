"""`make demo` must not meet a cluster that nobody named, nor empty a folder that no demo has made."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))

from hack.demo import demo  # noqa: E402
from hack.demo.out_folder import DEFAULT, MARK, PREVIOUS, claimed, drop_previous, make_anew  # noqa: E402
from hack.demo.settings import DemoError  # noqa: E402

FROM_ELSEWHERE = {"CONTEXT": "production", "STORE": "s3://theirs", "REGISTRY": "registry.example.com",
                  "NAMESPACE": "theirs", "RTJ_DEMO_CONTEXT": "production"}  # fmt: skip


WHAT = """
import json, os, sys
print(json.dumps(sys.argv[1:]))
"""


def typed(folder: Path, *words: str, **variables: str) -> list[str]:
    """What Python gets from `make demo WORDS`, without what make does before."""
    python = folder / "python"
    python.write_text(f"#!{sys.executable}{WHAT}")
    python.chmod(0o755)
    done = make("-o", "venv", "-o", "setup", "demo", f"PYTHON={python}", *words, **variables)
    found: list[str] = json.loads(done)
    assert found[0] == "hack/demo"
    return found[1:]


def make(*words: str, **variables: str) -> str:
    outer = {
        name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "ARGS"))
    }
    return subprocess.run(
        ["make", *words], cwd=ROOT, env={**outer, **variables}, capture_output=True, text=True, check=True
    ).stdout


def test_what_the_environment_says_is_not_the_demo_s(tmp_path: Path) -> None:
    assert typed(tmp_path, **FROM_ELSEWHERE) == []
    found = typed(tmp_path, "CONTEXT=my lab", "ARGS=--gpus 0 --overlay 'my folder'", **FROM_ELSEWHERE)
    assert found == ["--context=my lab", "--gpus", "0", "--overlay", "my folder"]
    assert make("-n", "demo", **FROM_ELSEWHERE).splitlines()[0].endswith("hack/setup.sh"), (
        "more for the local one"
    )


def test_what_is_typed_behind_make_demo_is_the_demo_s(tmp_path: Path) -> None:
    words = ["CONTEXT=lab", "STORE=s3://bucket/p", "REGISTRY=r.example.com/team", "NAMESPACE=mine"]
    assert typed(tmp_path, *words) == [
        "--context=lab", "--store=s3://bucket/p", "--registry=r.example.com/team", "--namespace=mine",
    ]  # fmt: skip
    first = make("-n", "demo", *words).splitlines()[0]
    assert first.endswith("hack/setup.sh python"), "no root is needed there"


@pytest.mark.parametrize("name", ["CONTEXT", "STORE", "REGISTRY", "NAMESPACE"])
def test_what_is_typed_is_neither_make_s_language_nor_a_shell_s(tmp_path: Path, name: str) -> None:
    ran = tmp_path / "ran"
    text = f"""a'; touch {ran}; echo '" $HOME $$ `touch {ran}` $(shell touch {ran}) $(touch {ran})"""
    assert typed(tmp_path, f"{name}={text}") == [f"--{name.lower()}={text}"]
    assert not ran.exists()


def test_a_folder_with_somebody_s_files_is_refused_and_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "results"
    results.mkdir()
    (results / "thesis.txt").write_text("years of work")
    needed = ["--context", "lab", "--store", "s3://bkt/p", "--registry", "r"]
    assert demo.main([*needed, "--out", str(results)]) == 1
    assert f"--out {results} is not empty and no demo has made it" in capsys.readouterr().err
    assert (results / "thesis.txt").read_text() == "years of work"
    with pytest.raises(DemoError, match="no demo has made it"), claimed(results / "thesis.txt"):
        pass


def test_a_folder_that_a_demo_has_made_is_emptied_and_an_empty_or_new_one_is_taken(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    for out in (tmp_path / "new" / "out", empty):
        with claimed(out):
            make_anew(out)
        (out / "ledger").mkdir()
        (out / "ledger" / "of-a-rank.jsonl").write_text("{}")
        (out / "status.jsonl").write_text("{}")
        (out / "link").symlink_to(tmp_path)
        with claimed(out):
            assert not make_anew(out)
            assert [path.name for path in out.iterdir()] == [MARK]
    assert DEFAULT == ROOT / "demo-out"


def test_the_report_of_the_run_before_stays_until_there_is_a_new_one(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with claimed(out):
        make_anew(out)
        (out / "report.json").write_text("the first")
        (out / "loss.png").write_text("drawn")
        drop_previous(out)
    for _ in range(2):  # runs without a report
        with claimed(out):
            assert make_anew(out)
            assert sorted(path.name for path in out.iterdir()) == [MARK, PREVIOUS]
            assert (out / PREVIOUS / "report.json").read_text() == "the first"
            assert (out / PREVIOUS / "loss.png").read_text() == "drawn"
    with claimed(out):
        make_anew(out)
        (out / "report.json").write_text("the second")
        drop_previous(out)
    assert sorted(path.name for path in out.iterdir()) == [MARK, "report.json"]


def test_a_demo_that_cannot_begin_leaves_the_last_report_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    with claimed(out):
        (out / "report.json").write_text("the last")
    kubectl = tmp_path / "kubectl"
    kubectl.write_text('#!/bin/sh\necho \'{"contexts": [{"name": "lab"}]}\'\n')
    kubectl.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    needed = ["--store", "s3://bkt/p", "--registry", "r", "--out", str(out)]
    assert demo.main(["--context", "typo", *needed]) == 1
    assert "context typo is not in your kubeconfig, which has lab" in capsys.readouterr().err
    assert sorted(path.name for path in out.iterdir()) == [MARK, "report.json"]


def test_two_demos_do_not_write_into_one_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    with claimed(out):
        (out / "report.json").write_text("of the first")
        needed = ["--context", "lab", "--store", "s3://bkt/p", "--registry", "r"]
        assert demo.main([*needed, "--out", str(out)]) == 1
        assert re.search(
            rf"--out {out} is in use .*process {os.getpid()}.*name another", capsys.readouterr().err
        )
        assert (out / "report.json").read_text() == "of the first"
    with claimed(out):
        assert make_anew(out), "free again"
