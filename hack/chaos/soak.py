"""From jobs that train to a verdict: schedule, faults, the way to the last step, evidence, audit."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from hack.chaos import jobs as chaos_jobs
from hack.chaos import nodes
from hack.chaos.audit import Control, Evidence, audit, standing_commits
from hack.chaos.journals import Journals
from hack.chaos.play import Play, Say, finish
from hack.chaos.record import ChaosError, Story
from hack.chaos.scene import Scene
from hack.chaos.schedule import Schedule
from hack.cluster_world import BUCKET, GPUS, ROOT, Job, World
from trainer_sidecar.audit.ledger import LedgerError
from trainer_sidecar.audit.proof import Proof
from trainer_sidecar.store.base import Store
from trainer_sidecar.store.deep import verify_bytes
from trainer_sidecar.store.history import restore_point
from trainer_sidecar.store.open import open_store
from trainer_sidecar.store.verify import BadCheckpointError

CONTROL_SECONDS = 600
LOG_LINES = 20_000
"""Of each log that is kept after a failure."""


@dataclass(frozen=True)
class Size:
    """How much is trained."""

    jobs: int = 3
    steps: int = 3600
    interval: int = 20
    """Steps between two saves."""
    pace: float = 0.5
    """Seconds that a step sleeps, until the faults are over."""
    idle: float = 600.0
    """A job without a step for so many seconds is stuck."""


@dataclass
class Outcome:
    """What a soak has come to."""

    schedule: Schedule
    story: Story = field(default_factory=Story)
    evidence: list[Evidence] = field(default_factory=list)
    proofs: dict[str, list[Proof]] = field(default_factory=dict)
    """By job."""
    stuck: list[str] = field(default_factory=list)

    @property
    def wrong(self) -> list[str]:
        """Every sentence that should not be there."""
        failed = [f"{job}: {p}" for job, proofs in self.proofs.items() for p in proofs if not p.holds]
        return [*self.story.troubles, *failed]


def soak(world: World, schedule: Schedule, size: Size, say: Say) -> Outcome:
    """Train, disturb, end, judge. Leaves the jobs and what they wrote where they are. Raises ChaosError, DemoError."""
    scene, gpus = Scene(world, []), chaos_jobs.gpus_per_node(size.jobs)
    nodes.set_all_gpus(scene, gpus)
    try:
        say(f"{size.jobs} jobs of {size.steps} steps, a save every {size.interval}")
        scene.jobs = chaos_jobs.start(
            world, size.jobs, steps=size.steps, interval=size.interval, pace=size.pace
        )
        say("all of them train and commit; the faults begin")
        return _disturb(scene, schedule, size, gpus, say)
    finally:
        nodes.set_all_gpus(scene, GPUS)


def _disturb(scene: Scene, schedule: Schedule, size: Size, gpus: int, say: Say) -> Outcome:
    outcome, store = Outcome(schedule), _open(scene.world)
    try:
        journals = Journals(store, {job.name: scene.keys(job.name) for job in scene.jobs})
        play = Play(scene, journals, gpus, size.steps, say)
        outcome.story = play.story
        play.run(schedule)
        say("all faults are over; the jobs hurry to their last step")
        outcome.stuck = finish(scene, play.story, size.idle, say)
        say("the audit")
        control = control_run(size.steps)
        for job in scene.jobs:
            evidence = _collect(scene, store, journals, job, outcome)
            if evidence is not None:
                outcome.evidence.append(evidence)
                outcome.proofs[job.name] = audit(evidence, control)
    finally:
        store.close()
    return outcome


def control_run(steps: int) -> Control:
    """The run that nobody disturbs, in a process of its own without any of ours. Raises ChaosError."""
    script = ROOT / "tests" / "cluster" / "replay.py"
    done = subprocess.run(
        [sys.executable, str(script), "--steps", str(steps), "--batch", str(chaos_jobs.BATCH)],
        capture_output=True, text=True, check=False, timeout=CONTROL_SECONDS, cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    if done.returncode != 0:
        raise ChaosError(f"the control run ended with exit code {done.returncode}:\n{done.stderr[-2000:]}")
    return Control(**json.loads(done.stdout))


def _open(world: World) -> Store:
    return open_store(
        f"s3://{BUCKET}/{world.stamp}",
        endpoint=world.cluster.host_s3_endpoint,
        region=world.cluster.variables["AWS_REGION"],
    )


def _collect(scene: Scene, store: Store, journals: Journals, job: Job, outcome: Outcome) -> Evidence | None:
    """What a job left behind; None when its ranks' ledgers cannot be believed, which is told as trouble."""
    entries, journal = job.entries(), journals.read_on(job.name)
    problems = {}
    for commit in standing_commits(entries, journal.damages):
        try:
            verify_bytes(store, scene.keys(job.name), restore_point(commit), parallel=2)
        except BadCheckpointError as error:
            problems[commit.checkpoint_id] = str(error)
        else:
            problems[commit.checkpoint_id] = ""
    try:
        ledgers = job.ledgers()
    except LedgerError as error:
        outcome.story.troubles.append(f"{job.name}: {error}")
        return None
    return Evidence(job.name, entries, journal.entries, ledgers, journal.damages, problems)


def keep(world: World, outcome: Outcome, folder: Path) -> None:
    """Journals, ledgers, events, logs and the operator's log of a soak, for whoever looks for the cause."""
    folder.mkdir(parents=True, exist_ok=True)
    for evidence in outcome.evidence:
        lines = [entry.model_dump_json(by_alias=True) for entry in evidence.entries]
        (folder / f"{evidence.job}-journal.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "cluster.txt").write_text(world.diagnosis(LOG_LINES))
