"""docs/quick-start.md, as a new user follows it: each kubectl and rtj command of "On your own cluster", in its order.

Two things differ from the page: the namespace is that of the tests, which the operator serves; and the job's image is a
bare Python with this machine's torch, since one with torch is 5 GB. The page's helm commands are those of
docs/install.md, which `operator/test_chart_life_on_cluster.py` runs.
"""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from hack.cluster_world import BUCKET, NAMESPACE, START_SECONDS, Job, World, trainer_container, volumes

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "quick-start.md").read_text(encoding="utf-8")
INSTALL = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
EXAMPLE = ROOT / "examples" / "pretrain"
_MAIN = "import sys; from trainer_sidecar.cli import {main}; sys.exit({main}())"


def commands(page: str) -> list[str]:
    """Of the page's blocks for a shell, a continued line as one."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]


def the_job(world: World) -> dict[str, Any]:
    """examples/pretrain/job.yaml, with what the page says to set in it: image, store, and no GPUs."""
    document: dict[str, Any] = yaml.safe_load((EXAMPLE / "job.yaml").read_text())
    spec = document["spec"]
    spec["nodes"] = 1
    del spec["elastic"]
    spec["checkpoint"]["store"]["url"] = f"s3://{BUCKET}/{world.stamp}"
    spec["checkpoint"]["intervalSteps"] = 5
    pod = spec["template"]["spec"]
    own = pod["containers"][0]
    pod["containers"] = [{**trainer_container({}), "command": own["command"], "args": own["args"]}]
    pod["volumes"] = copy.deepcopy(volumes(world.ledger("quick-start")))
    next(v for v in pod["volumes"] if v["name"] == "scripts")["hostPath"]["path"] = str(EXAMPLE)
    return document


def shell(world: World, folder: Path, line: str) -> str:
    """What a line of the page prints, in a shell that has kubectl, rtj and the plugin, as the page asks for."""
    for name, main in (("rtj", "main"), ("kubectl-rtj", "kubectl_main")):
        program = folder / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{_MAIN.format(main=main)}" "$@"\n')
        program.chmod(0o755)
    variables = world.cluster.variables
    env = {
        **variables,
        "PATH": f"{folder / 'bin'}:{variables.get('PATH', os.environ['PATH'])}",
        "RTJ_STORE_ENDPOINT": world.cluster.host_s3_endpoint,
        "RTJ_STORE_REGION": variables["AWS_REGION"],
    }
    done = subprocess.run(
        ["bash", "-c", line], cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    return done.stdout


def verified(job: Job) -> dict[str, Any] | None:
    """The condition, once the steps after the resume were compared."""
    found = job.condition("ResumeVerified")
    return found if found.get("status") == "True" else None


@pytest.fixture
def fresh_namespace(world: World) -> Iterator[str]:
    """The one that the page makes. The operator of the tests does not serve it."""
    name = f"{NAMESPACE}-ml"
    yield name
    world.cluster.kubectl("delete", "namespace", name, "--ignore-not-found", "--wait=false")


def test_the_page_leads_from_helm_to_a_job_that_was_killed_and_has_resumed(
    world: World, fresh_namespace: str, tmp_path: Path
) -> None:
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(the_job(world)))
    job, said, committed = Job(world, "pretrain", world.stamp), {}, 0
    for line in commands(PAGE):
        program, verb, what, *_ = line.split()
        key = f"{program} {verb} {what}".removesuffix(" pretrain")
        if program == "helm":
            assert any(line.startswith(known) for known in commands(INSTALL)), line
            continue
        if verb == "delete" and what == "pod":
            committed = job.wait_commit(beyond=0)
        if key == "kubectl rtj attempts":
            job.wait_training(attempt=2)
            job.wait("compared resume", START_SECONDS, verified)
        # The namespace is made for real, and the job goes where the operator of the tests looks.
        fresh = key in ("kubectl create namespace", "kubectl create secret")
        said[key] = shell(world, tmp_path, re.sub(r"\bml\b", fresh_namespace if fresh else NAMESPACE, line))
        if key == "kubectl apply --namespace":
            world.jobs.append(job)
    assert "dp1xtp1xpp1" in said["rtj plan -f"]
    assert "pretrain" in said["kubectl get rtj"]
    assert said["kubectl rtj why"].startswith("Now:")
    attempts = said["kubectl rtj attempts"]
    assert "PodLost" in attempts
    assert "ResumeVerified" in said["kubectl describe rtj"]
    assert "<svg" in (tmp_path / "pretrain.html").read_text()
    assert committed > 0
    assert [attempt.attempt for attempt in job.history().attempts] == [1, 2]
    assert not job.object
