"""Each command that a page shows is run by a test, or stands here with a reason why not; `rtj` takes all of its own.

A command counts as run by the test that `RULES` names, which must exist and read the page. The short ones are run here.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from trainer_sidecar import cli
from trainer_sidecar.contract.keys import RunKeys
from trainer_sidecar.store.journal import Journal
from trainer_sidecar.store.open import open_store

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "store"))

import store_world as world  # noqa: E402

PROGRAMS = frozenset(
    {
        "make",
        "rtj",
        "kubectl",
        "helm",
        "docker",
        "pip",
        "python",
        "python3",
        "bash",
        "git",
        "source",
        "eval",
        "cp",
        "sudo",
    }
)
SHELLS = ("console", "sh", "bash", "shell", "")
NO_DOCKER = "no Docker here; the Dockerfile's targets are built and opened by release/test_images_built.py"
THIRD = "the test of the page runs its script, tests/run runs `rtj run`; both together would start ranks a third time"


@dataclass(frozen=True)
class Rule:
    """For commands of a page that match: the tests (`file::name` below `tests/`) that run them, or why none does."""

    page: str
    pattern: str
    tests: tuple[str, ...] = ()
    why: str = ""


HERE = "docs/test_commands.py::"
CHART_LIFE = (
    "operator/test_chart_life_on_cluster.py::"
    "test_a_job_trains_through_upgrade_rollback_and_uninstall_and_a_new_installation_takes_it_up"
)
QUICK = "cluster/test_cluster_quick_start.py::"
QUICK += "test_the_page_leads_from_helm_to_a_job_that_was_killed_and_has_resumed"
VALUES = "monitoring/test_chart.py::test_values_that_the_documents_set_are_values_of_the_chart"
WEIGHTS = (HERE + "test_weights_go_in_and_out_by_the_commands_of_the_pages",)
CHECKPOINTS = (HERE + "test_the_checkpoints_of_a_run_are_listed_by_the_commands_of_the_pages",)
KUBECTL_PAGE = "kube_commands/test_kubectl_page.py::"

RULES = (
    Rule("*", r"make (demo|test)\b", why="CI runs `make test`, whose tests on the cluster tell the demo's story; `make "
         "demo` takes minutes and is run by hand"),
    Rule("*", r"docker (build|push|run) ", why=NO_DOCKER),
    Rule("README.md", r"rtj run ", why=THIRD),
    Rule("README.md", r"rtj checkpoints list ", CHECKPOINTS),
    Rule("docs/add-it-to-your-script.md", r"rtj run ",
         ("train/test_script_pages.py::test_the_command_of_the_page_trains_the_script_of_the_page",)),
    Rule("docs/chaos.md", r"\S+ hack/chaos .*--schedule", (HERE + "test_a_schedule_of_the_chaos_is_printed",)),
    Rule("docs/chaos.md", r"\S+ hack/chaos --minutes", why="half an hour; cluster/test_cluster_chaos.py is shorter"),
    Rule("docs/drills.md", r"kubectl rtj drill faults ", why="twelve minutes; cluster/test_cluster_fault_drills.py "
         "runs a shorter campaign, kube_commands/test_fault_drills.py parses these lines"),
    Rule("docs/export.md", r"rtj export ", WEIGHTS),
    Rule("docs/import.md", r"rtj (import|export) ", WEIGHTS),
    Rule("docs/import.md", r"rtj run --resume-from ", why=THIRD),
    Rule("docs/install.md", r"--set ", why="two lines of another command; docs/quick-start.md has the whole of it"),
    Rule("docs/install.md", r"kubectl create secret ", why="it leaves the keys out; docs/quick-start.md's is run"),
    Rule("docs/install.md", r"helm (install|upgrade|rollback|uninstall) ", (CHART_LIFE,)),
    Rule("docs/install.md", r"kubectl delete ", why="they empty a cluster that other tests share"),
    Rule("docs/kubectl-rtj.md", r"kubectl rtj ", (KUBECTL_PAGE + "test_the_commands_of_the_page_do_what_it_says",)),
    Rule("docs/kubectl-rtj.md", r"pip install ", why="no index has it yet; release/test_packages.py installs it"),
    Rule("docs/kubectl-rtj.md", r"source ", why="kube_commands/test_completion.py has bash complete by it"),
    Rule("docs/lightning.md", r"rtj run ", why=THIRD),
    Rule("docs/monitoring.md", r"helm upgrade ", (VALUES,)),
    Rule("docs/quick-start.md", r"helm ", (CHART_LIFE, QUICK)),
    Rule("docs/quick-start.md", r"(kubectl|rtj) ", (QUICK,)),
    Rule("docs/torchtitan.md", r"rtj run ", why=THIRD),
    Rule("docs/transformers.md", r"rtj run ", why=THIRD),
    Rule("examples/pretrain/README.md", r"OMP_NUM_THREADS=1 rtj run ", why="the control run of the demo is this one"),
    Rule("examples/pretrain/README.md", r"rtj checkpoints list ", CHECKPOINTS),
    Rule("examples/*/README.md", r"rtj plan ", (HERE + "test_the_job_of_an_example_can_be_planned",)),
    Rule("examples/*/README.md", r"kubectl ", why="docs/quick-start.md's, with a namespace, are run"),
    Rule("examples/*/README.md", r"(rtj run|rtj import|python) ", why="integrations/test_trl.py starts the examples' "
         "ranks on two meshes; `rtj run` and `rtj import` have tests of their own"),
    Rule("hack/cluster/README.md", r"", why="every test on the cluster starts and asks it so"),
    Rule("hack/demo/README.md", r"", why="a walk by hand; demo/test_demo_on_own_cluster.py has its parts"),
)  # fmt: skip


@cache
def commands() -> tuple[tuple[str, str], ...]:
    """(page, command) of each block for a shell, and of others with a program's name. A continued line is one."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    found = []
    for page in sorted(filter(None, listed.split("\0"))):
        text = (ROOT / page).read_text(encoding="utf-8")
        for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            lines = [line.partition(" #")[0].strip() for line in block.replace("\\\n", " ").splitlines()]
            lines = [line for line in lines if line and not line.startswith("#")]
            if language in SHELLS and (language or any(is_command(line) for line in lines)):
                found += [(page, line) for line in lines]
    return tuple(found)


def is_command(line: str) -> bool:
    first = next((word for word in line.split() if "=" not in word), "")
    return first.rpartition("/")[2] in PROGRAMS


def rule_of(page: str, command: str) -> Rule | None:
    return next((r for r in RULES if fnmatch(page, r.page) and re.match(r.pattern, command)), None)


def the(page: str, pattern: str, **stands_for: str) -> list[str]:
    """The words of the one command of a page that matches, behind the program; words of the page are replaced."""
    (command,) = [c for p, c in commands() if p == page and re.match(pattern, c)]
    words = shlex.split(command)[1:]
    return [stands_for.get(word.strip("./").replace("-", "_"), word) for word in words]


def test_every_command_of_every_page_is_run_or_has_its_reason() -> None:
    assert len(commands()) > 60
    assert [f"{page}: {command}" for page, command in commands() if rule_of(page, command) is None] == []
    used = {rule_of(page, command) for page, command in commands()}
    assert [rule for rule in RULES if rule not in used] == [], "rules for commands that no page has"
    assert [rule for rule in RULES if bool(rule.tests) == bool(rule.why)] == []


def test_the_tests_that_are_named_exist_and_read_the_page() -> None:
    for rule in RULES:
        for test in rule.tests:
            file, _, name = test.partition("::")
            text = (ROOT / "tests" / file).read_text(encoding="utf-8")
            functions = {node.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)}
            assert name in functions, test
            reads = Path(rule.page).name in text or test in (VALUES, CHART_LIFE)
            assert reads, f"{test} does not read {rule.page}"


def test_every_command_of_rtj_is_one_that_it_takes() -> None:
    """Also where no test can run it: an option that has gone is noticed. Files and objects need not exist."""
    parsed = 0
    for page, command in commands():
        words = [
            word
            for word in shlex.split(command.replace("<(", "").rstrip(")"))
            if not re.match(r"[A-Z_]+=", word)
        ]
        words = words[1:] if words[:1] in (["kubectl"], ["source"]) and words[1:2] == ["rtj"] else words
        if words[:1] == ["rtj"]:
            try:
                cli.build_parser().parse_args(words[1:])
            except SystemExit:
                pytest.fail(f"{page}: {command}")
            parsed += 1
    assert parsed > 30


def test_targets_that_docker_and_make_are_told_exist() -> None:
    stages = set(re.findall(r"^FROM \S+ AS (\S+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE))
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    asked: set[str] = set()
    for _, command in commands():
        asked |= {f"docker {name}" for name in re.findall(r"docker build .*--target (\S+)", command)}
        asked |= {f"make {name}" for name in re.findall(r"^make ([a-z-]+)", command)}
    assert asked >= {"docker operator", "make demo"}
    assert asked <= {f"docker {name}" for name in stages} | {f"make {name}" for name in targets}


@pytest.fixture
def rtj(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """`rtj WORDS` in an empty folder, with the pages' stores in a folder beside it."""
    monkeypatch.chdir(tmp_path)

    def run(words: list[str]) -> str:
        places = {
            "file:///data/checkpoints",
            "file:///tmp/checkpoints",
            "s3://bucket/team-a",
            "s3://ckpt/team-a",
        }
        assert cli.main([f"file://{tmp_path}/store" if word in places else word for word in words]) == 0
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize(
    ("page", "run"), [("README.md", "train"), ("examples/pretrain/README.md", "pretrain")]
)
def test_the_checkpoints_of_a_run_are_listed_by_the_commands_of_the_pages(
    rtj: Callable[..., str], tmp_path: Path, page: str, run: str
) -> None:
    words = the(page, "rtj checkpoints list ")
    keys = RunKeys("local", run)
    store = open_store(f"file://{tmp_path}/store")
    journal = Journal(store, keys, parallel=1, pause=world.no_pause)
    fenced = world.fence_and_pick(journal, world.request())
    saved = [world.save(store, fenced, step, keys=keys).checkpoint_id for step in (100, 200)]
    listed = rtj(words)
    assert all(name in listed for name in saved)


@pytest.mark.slow
def test_weights_go_in_and_out_by_the_commands_of_the_pages(rtj: Callable[..., str], tmp_path: Path) -> None:
    """docs/import.md and docs/export.md, in an order in which each finds what the one before has left."""
    base = tmp_path / "base-model"
    base.mkdir()
    weights = {"layer.weight": np.arange(6, dtype=np.float32).reshape(2, 3)}
    save_file(weights, base / "model.safetensors")
    (base / "config.json").write_text(json.dumps({"model_type": "test"}))
    first, second = (c for p, c in commands() if p == "docs/import.md" and c.startswith("rtj import "))
    rtj(shlex.split(first)[1:])
    rtj([word.replace("base", "sft") if word == "base" else word for word in shlex.split(first)[1:]])
    rtj(the("docs/import.md", "rtj export "))
    assert load_file(tmp_path / "weights" / "model.safetensors").keys() == weights.keys()
    rtj(shlex.split(second)[1:])
    rtj([word.replace("sft-local", "sft") for word in shlex.split(second)[1:]])
    rtj(the("docs/export.md", "rtj export "))
    out = load_file(tmp_path / "sft" / "model.safetensors")
    assert out.keys() == weights.keys()
    assert np.array_equal(out["layer.weight"], weights["layer.weight"])
    assert json.loads((tmp_path / "sft" / "config.json").read_text()) == {"model_type": "test"}


@pytest.mark.parametrize(
    "page", sorted({page for page, _ in commands() if fnmatch(page, "examples/*/README.md")})
)
def test_the_job_of_an_example_can_be_planned(rtj: Callable[..., str], tmp_path: Path, page: str) -> None:
    (tmp_path / "job.yaml").write_bytes((ROOT / page).with_name("job.yaml").read_bytes())
    planned = rtj(the(page, "rtj plan "))
    assert re.search(r"\bdp\d+", planned)


def test_a_schedule_of_the_chaos_is_printed() -> None:
    """The command of docs/chaos.md."""
    words = the("docs/chaos.md", r"\S+ hack/chaos .*--schedule")
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "seed 7" in done.stdout
