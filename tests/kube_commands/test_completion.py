"""Completion answers from the parser itself and from the cluster; shells and kubectl ask it in the same way."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cluster_desk import Desk
from job_values import job

from trainer_sidecar import cli


def ask(desk: Desk, *words: str) -> list[str]:
    assert cli.main(["__complete", *words]) == 0
    out, _ = desk.capture()
    return str(out).split()


@pytest.mark.parametrize(
    ("words", "some"),
    [
        (("st",), {"status", "store"}),
        (("checkpoints", "v"), {"verify"}),
        (("logs", "--s"), {"--sidecar"}),
        (("status", "-o", ""), {"table", "json"}),
        (("completion", ""), {"bash", "zsh", "fish"}),
        (("checkpoints", "list", "--jo"), {"--job"}),
    ],
)
def test_commands_options_and_choices_are_completed(
    desk: Desk, words: tuple[str, ...], some: set[str]
) -> None:
    assert set(ask(desk, *words)) == some


def test_names_of_jobs_come_from_the_cluster_that_the_line_names(desk: Desk) -> None:
    for name, namespace in (("sft", "team"), ("sft-2", "team"), ("dpo", "other")):
        desk.server.put(job(name, namespace=namespace))
    place = ("--kubeconfig", str(desk.kubeconfig))
    assert ask(desk, "why", *place, "s") == ["sft", "sft-2"]
    assert ask(desk, "why", *place, "-n", "other", "") == ["dpo"]
    assert ask(desk, "checkpoints", "list", *place, "--job", "") == ["sft", "sft-2"]
    assert ask(desk, "why", "--kubeconfig", "/none", "") == []
    assert ask(desk, "run", "--", "") == []


def test_kubectl_is_answered_in_its_protocol(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", ["kubectl_complete-rtj", "wh"])
    assert cli.kubectl_complete() == 0
    assert desk.capture()[0] == "why\n:4\n"
    monkeypatch.setattr(sys, "argv", ["kubectl-rtj", "why", "--help"])
    with pytest.raises(SystemExit):
        cli.kubectl_main()
    assert desk.capture()[0].startswith("usage: kubectl rtj why")


def test_the_script_for_bash_completes_in_a_bash(desk: Desk, tmp_path: Path) -> None:
    (tmp_path / "rtj").write_text(f'#!/bin/sh\nexec {sys.executable} -m trainer_sidecar.cli "$@"\n')
    (tmp_path / "rtj").chmod(0o755)
    assert cli.main(["completion", "bash"]) == 0
    script = desk.capture()[0]
    line = f'{script}\nCOMP_WORDS=(rtj rollback --re); COMP_CWORD=2; _rtj; echo "${{COMPREPLY[@]}}"\n'
    path = f"{tmp_path}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(
        ["bash", "-c", line], env=env, capture_output=True, text=True, check=True, timeout=60
    )
    assert ran.stdout.split() == ["--reason", "--region"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_other_scripts_are_syntax_of_their_shell(desk: Desk, shell: str) -> None:
    assert cli.main(["completion", shell]) == 0
    script = desk.capture()[0]
    assert "rtj __complete" in script
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, check=True, timeout=60)
