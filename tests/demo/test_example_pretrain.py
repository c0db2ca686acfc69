"""The example is what its README says: few lines of ours, one job for every cluster."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from rtj_operator.api import parse_job
from rtj_operator.api.effective import OperatorDefaults, effective
from rtj_operator.mesh import MeshPlan, plan

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "pretrain"


def ours() -> list[str]:
    return [line for line in (EXAMPLE / "train.py").read_text().splitlines() if "# rtj" in line]


def test_the_script_needs_at_most_fifteen_lines_of_ours_and_the_readme_counts_them() -> None:
    assert len(ours()) <= 15
    assert f"{len(ours())} of the lines" in (EXAMPLE / "README.md").read_text()


def test_every_line_that_uses_this_project_is_marked() -> None:
    used = re.compile(r"\b(session|Session|trainer_sidecar)\b")
    code = (EXAMPLE / "train.py").read_text().split('"""', 2)[2]
    assert [line for line in code.splitlines() if used.search(line) and "# rtj" not in line] == []


def test_the_job_keeps_its_global_batch_at_both_sizes() -> None:
    spec = effective(parse_job(yaml.safe_load((EXAMPLE / "job.yaml").read_text())), OperatorDefaults())
    found = {}
    for nodes in (1, 2):
        planned = plan(spec.mesh, nodes)
        assert isinstance(planned, MeshPlan)
        topology = planned.topology
        found[topology.mesh.dp] = (topology.batch.micro_batch_size, topology.batch.accumulation)
    assert found == {2: (4, 4), 4: (4, 2)}
