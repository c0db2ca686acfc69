"""torchtitan killed, stopped and resumed: the page's samples on CPUs, in torchtitan's own environment.

One parent for all but `rtj run`, whose ranks torchrun starts.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from framework_runs import POLICY, SCRIPTS, Lab
from rank_world import ROOT, RankWorld, topology
from warm_ranks import WarmRanks, log_of

from trainer_sidecar.contract.journal import RestorePoint
from trainer_sidecar.contract.outcome import OutcomeKind
from trainer_sidecar.contract.plan import Plan
from trainer_sidecar.train.extra_state import targets

pytestmark = [pytest.mark.torchrun, pytest.mark.slow, pytest.mark.timeout(600)]
STEPS = 6
PAIR, ALONE, TENSOR = topology(2, 8, micro=2), topology(1, 8, micro=4), topology(2, 8, micro=4, tp=2)
SAME_NUMBERS = "--training.mixed_precision_param float32"
"""bfloat16, the default, hides a sample too many in its rounding."""


@pytest.fixture(scope="session")
def python() -> str:
    """The interpreter of torchtitan's environment, which is made where there is none."""
    path = ROOT / ".venv-torchtitan/bin/python"
    if not path.exists():
        subprocess.run([str(ROOT / "hack/setup.sh"), "environment", "torchtitan"], check=True, timeout=540)
    return str(path)


class TitanRanks(WarmRanks):
    """A parent in torchtitan's environment."""

    def __init__(self, folder: Path, python: str) -> None:
        self._log = folder / "warm.log"
        self._process = subprocess.Popen(
            [python, str(ROOT / "tests/train/scripts/warm.py")],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log.open("wb"),
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{SCRIPTS}"},
        )


class TitanLab(Lab):
    """The page's samples in a folder with a tokenizer and texts, and attempts of one run with them."""

    def __init__(self, root: Path, python: str) -> None:
        self.root, self.python = root, python
        self.world, self.warm = RankWorld(root / "run"), TitanRanks(root, python)
        self.world.out.mkdir()
        for name, text in samples().items():
            (root / name).write_text(text)
        write_texts(root)
        self.environment = {"HF_DATASETS_CACHE": str(root / "cache"), "HF_HUB_OFFLINE": "1"}

    def attempt(self, where: Any, restore: RestorePoint | None = None, *, order: float = 0) -> Plan:
        """`order`: it is told to save and exit before its first step, with so many seconds."""
        policy = POLICY.model_copy(update={"grace_seconds": order}) if order else POLICY
        plan = self.world.attempt(where, restore, checkpoint=policy)
        if order:
            self.world.volume.order(plan.epoch).write_text("SaveAndExit")
        return plan

    def run(self, plan: Plan, script: str, **env: str) -> list[int]:
        """`script`: a function of `my_config`, with torchtitan's options behind it; or a script of these tests."""
        told = {**self.environment, "TITAN_HOME": str(self.root), **env}
        if not script.endswith(".py"):
            told["TITAN_ARGS"] = f"--module my_config --config {script} {SAME_NUMBERS}"
            script = "torchtitan_rank.py"
        imports = ("torchtitan_on_cpu", "torchtitan.models.llama3.config_registry")
        return self.warm.run(self.world, plan, str(SCRIPTS / script), imports=imports, **told)

    def finished(self, plan: Plan, script: str, **env: str) -> list[dict[str, Any]]:
        codes = self.run(plan, script, **env)
        assert set(codes) == {0}, f"{codes}:\n{self.log(plan)}"
        paths = sorted(self.world.out.glob(f"torchtitan-e{plan.epoch}-r*.json"))
        return [json.loads(path.read_text()) for path in paths]

    def commit(self, plan: Plan, step: int) -> RestorePoint:
        return self.point(next(c for c in self.commits(plan) if c.step == step))

    def digest(self, plan: Plan) -> str | None:
        return self.manifest(self.commits(plan)[-1]).state_digest

    def all_of(self, plan: Plan) -> str:
        return log_of(self.world, plan).read_text(errors="replace")

    def seen(self, plan: Plan) -> dict[int, tuple[float, float, list[float]]]:
        """Loss, gradient norm and learning rates of each step."""
        return seen(self.world.ledger, f"job-e{plan.epoch}-r*.jsonl")


def seen(folder: Path, pattern: str) -> dict[int, tuple[float, float, list[float]]]:
    """The mean loss over the ranks of what they wrote down."""
    found: dict[int, list[dict[str, Any]]] = {}
    for path in sorted(folder.glob(pattern)):
        for line in map(json.loads, path.read_text().splitlines()):
            if line["kind"] == "step":
                found.setdefault(line["step"], []).append(line)
    return {
        step: (sum(r["loss"] for r in ranks) / len(ranks), ranks[0]["gradNorm"], ranks[0]["lr"])
        for step, ranks in found.items()
    }


def samples() -> dict[str, str]:
    """The page's, by file."""
    page = (ROOT / "docs/torchtitan.md").read_text()
    return dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", page, flags=re.DOTALL))


def write_texts(root: Path) -> None:
    """A tokenizer of 40 words, and texts of unlike length."""
    for name in ("tokenizer", "texts"):
        (root / name).mkdir()
    words = [f"w{i}" for i in range(40)]
    vocabulary = {word: i for i, word in enumerate(["<s>", "</s>", "<unk>", *words])}
    tokenizer = {
        "version": "1.0",
        **dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder")),
        "added_tokens": [],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
    }
    (root / "tokenizer/tokenizer.json").write_text(json.dumps(tokenizer))
    (root / "tokenizer/tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": "</s>"})
    )
    texts = [" ".join(words[(i * 7 + k * k) % 40] for k in range(5 + i % 23)) for i in range(60)]
    (root / "texts/train.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, python: str) -> Iterator[TitanLab]:
    made = TitanLab(tmp_path_factory.mktemp("torchtitan"), python)
    yield made
    made.close()


@pytest.fixture(scope="module")
def control(lab: TitanLab) -> tuple[Plan, list[dict[str, Any]]]:
    plan = lab.attempt(PAIR)
    return plan, lab.finished(plan, "any_mesh", TITAN_WEIGHTS=str(lab.root / "weights"))


def test_torchtitan_trains_in_the_sessions_order_and_commits_all_of_its_state(
    lab: TitanLab, control: tuple[Plan, list[dict[str, Any]]]
) -> None:
    plan, ranks = control
    assert [c.step for c in lab.commits(plan)] == [2, 4, STEPS]
    assert lab.outcome(plan) is OutcomeKind.FINISHED
    assert (ranks[0]["step"], ranks[0]["accumulation"], ranks[0]["restored"]) == (STEPS, 2, False)
    assert ranks[0]["tokens"] == STEPS * 4 * 16
    consumed = [i for step in sorted(lab.samples(plan)) for i in lab.samples(plan)[step]]
    assert consumed == list(range(8 * STEPS))
    rates = [found[2][0] for found in lab.seen(plan).values()]
    assert rates == pytest.approx([4e-4, 8e-4, 8e-4, 6e-4, 4e-4, 2e-4])
    manifest = lab.manifest(lab.commits(plan)[-1])
    state, prints = manifest.training_state, manifest.fingerprints
    assert len(state.trainable) == 2 * 7 + 3
    assert (len(state.optimizers), len(state.schedulers)) == (1, 1)
    assert prints["training.optimizer.implementation"] == "fused"
    assert "training.training.local_batch_size" not in prints
    assert not any(" at 0x" in value for value in prints.values())


def test_killed_then_stopped_on_order_it_goes_on_on_another_number_of_ranks_and_is_verified(
    lab: TitanLab, control: tuple[Plan, list[dict[str, Any]]]
) -> None:
    plan, ranks = control
    killed = lab.attempt(PAIR)
    assert -9 in lab.run(killed, "any_mesh", TITAN_KILL="5")
    newest = lab.commits(killed)[-1]
    assert newest.step in (2, 4)
    ordered = lab.attempt(PAIR, lab.point(newest), order=600)
    lab.finished(ordered, "any_mesh --parallelism.data_parallel_replicate_degree 2")
    assert lab.outcome(ordered) is OutcomeKind.SAVED_AND_STOPPED
    (stopped,) = lab.commits(ordered)
    assert stopped.step == newest.step + 1
    until = {s: v for s, v in lab.seen(plan).items() if s <= stopped.step}
    compare(lab.seen(ordered), until, newest.step)
    resumed = lab.attempt(ALONE, lab.commit(plan, 2))
    (found,) = lab.finished(resumed, "any_mesh")
    assert found["resume"]["verified"] is True, found["resume"]
    assert found["resume"]["resharded"] is True
    assert found["tokens"] == sum(rank["tokens"] for rank in ranks)
    assert lab.samples(resumed) == {s: i for s, i in lab.samples(plan).items() if s > 2}
    compare(lab.seen(resumed), lab.seen(plan), 2)


def compare(found: dict[int, Any], control: dict[int, Any], after: int) -> None:
    assert sorted(found) == [step for step in sorted(control) if step > after]
    for step, (loss, norm, rates) in found.items():
        assert loss == pytest.approx(control[step][0], rel=1e-5)
        assert norm == pytest.approx(control[step][1], rel=1e-4)
        assert rates == control[step][2]


@pytest.fixture(scope="module")
def cut(lab: TitanLab, control: tuple[Plan, list[dict[str, Any]]]) -> tuple[Plan, dict[str, Any]]:
    """An attempt whose order comes with step 3 and cannot wait for the eight micro batches of step 4."""
    hasty = POLICY.model_copy(update={"grace_seconds": 0.001})
    plan = lab.world.attempt(topology(1, 8, micro=1), lab.commit(control[0], 2), checkpoint=hasty)
    (found,) = lab.finished(plan, "any_mesh", TITAN_ORDER="3")
    return plan, found


def test_an_order_that_cannot_wait_cuts_the_window_and_saves_it_as_it_began(
    lab: TitanLab, cut: tuple[Plan, dict[str, Any]]
) -> None:
    plan, found = cut
    assert lab.outcome(plan) is OutcomeKind.SAVED_AND_STOPPED
    assert "the order to stop came inside step 4" in lab.all_of(plan)
    assert (found["step"], found["tokens"]) == (3, (3 * 8 + 1) * 16)
    (saved,) = lab.commits(plan)
    assert saved.step == 3
    state = lab.manifest(saved).training_state
    assert state.accumulation == {"discarded": 1}
    assert targets(state.extra["torchtitan"], {}) == {"tokens": 3 * 8 * 16}


def test_tensor_parallel_layers_go_on_with_the_window_that_was_cut(
    lab: TitanLab, control: tuple[Plan, list[dict[str, Any]]], cut: tuple[Plan, dict[str, Any]]
) -> None:
    plan, _ = control
    tensor = lab.attempt(TENSOR, lab.commit(cut[0], 3))
    ranks = lab.finished(tensor, "any_mesh --parallelism.tensor_parallel_degree 2")
    assert ranks[0]["resume"]["verified"] is True, ranks[0]["resume"]
    assert [rank["tokens"] for rank in ranks] == [STEPS * 8 * 16] * 2
    compare(lab.seen(tensor), lab.seen(plan), 3)


def test_a_loader_of_torchtitans_goes_on_on_the_same_mesh_only(
    lab: TitanLab, control: tuple[Plan, list[dict[str, Any]]]
) -> None:
    own = {"TITAN_SCRIPT": str(lab.root / "train.py")}
    weights = lab.root / "weights"
    start = f"same_mesh --checkpoint.initial_load_path {weights} --checkpoint.initial_load_model_only"
    plan = lab.attempt(PAIR)
    ranks = lab.finished(plan, start, **own)
    assert ranks[0]["began"] == control[1][0]["ended"], "weights of elsewhere"
    again = lab.attempt(PAIR, lab.commit(plan, 2))
    found = lab.finished(again, start, **own)
    assert found[0]["resume"]["verified"] is True
    assert found[0]["tokens"] == ranks[0]["tokens"]
    assert lab.seen(again) == {s: v for s, v in lab.seen(plan).items() if s > 2}, "bit for bit"
    assert lab.digest(again) == lab.digest(plan)
    other = lab.attempt(ALONE, lab.commit(plan, 2))
    assert lab.run(other, start, **own) == [1]
    assert lab.outcome(other) is OutcomeKind.RESUME_REFUSED
    assert "per_rank objects ['data'] were saved on dp2" in lab.log(other)
    short = lab.attempt(ALONE)
    (ended,) = lab.finished(short, f"{start} --dataloader.no-infinite --training.steps 40", **own)
    assert 6 < ended["step"] < 12, "a thousand tokens in steps of 8 x 16"
    assert lab.commits(short)[-1].step == ended["step"]
    assert lab.outcome(short) is OutcomeKind.FINISHED


def test_rtj_run_starts_it_again_after_a_kill(lab: TitanLab, tmp_path: Path) -> None:
    """The page's command on one rank, since importing torchtitan costs each rank of an attempt ten seconds. Its first
    attempt, killed after step 5, is the control run of the second one."""
    (command,) = re.findall(
        r"```console\nrtj (run .*?)\n```", (ROOT / "docs/torchtitan.md").read_text(), flags=re.DOTALL
    )
    options, _, words = " ".join(command.replace("\\", "").split()).partition(" -- -m torchtitan.train ")
    for old, new in ((" 2 ", " 1 "), ("file:///data/checkpoints", f"file://{tmp_path}/store")):
        assert old in options
        options = options.replace(old, new)
    options += f" --max-micro-batch 2 --interval-steps 2 --ledger {tmp_path}/ledger --backoff-seconds 0"
    script = f"-- {SCRIPTS}/torchtitan_rank.py {words} {SAME_NUMBERS}"
    told = {"TITAN_KILL": "5", "TINY_OUT": str(tmp_path), "OMP_NUM_THREADS": "1", **lab.environment}
    done = subprocess.run(
        [lab.python, "-m", "trainer_sidecar.cli", *options.split(), *script.split()],
        cwd=lab.root,
        env={**os.environ, **told},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    (path,) = tmp_path.glob("torchtitan-e*-r0.json")
    found = json.loads(path.read_text())
    assert found["resume"]["step"] in (2, 4)
    assert all(check["passed"] for check in found["resume"]["checks"])
    first, second = (
        seen(tmp_path / "ledger", path.name)
        for path in sorted((tmp_path / "ledger").glob("*-r0.jsonl"), key=lambda p: p.stat().st_mtime)
    )
    assert sorted(first) == [1, 2, 3, 4, 5]
    assert sorted(second) == list(range(found["resume"]["step"] + 1, STEPS + 1))
    assert {s: v for s, v in second.items() if s < STEPS} == {s: first[s] for s in second if s < STEPS}


REFUSED = {
    "tp": "parallelism.tensor_parallel_degree is 2, tp of the plan's mesh dp1xtp1xpp1/zero3 is 1: start with --tp 2",
    "pp": "parallelism.pipeline_parallel_degree is 2, pp of the plan's mesh .* is 1; .*: leave both at 1",
    "cp": "parallelism.context_parallel_degree is 2, .* leave it at 1",
    "ep": "parallelism.expert_parallel_degree is 2, .* leave it at 1",
    "dp": "data_parallel_replicate_degree 1 x data_parallel_shard_degree 4 is not dp 1 of the plan's mesh",
    "hsdp": "data_parallel_replicate_degree 2 x data_parallel_shard_degree -1 is not dp 1 of the plan's mesh",
    "comm": "comm.mode fake_backend: .* use default",
    "step": "checkpoint.load_step 4: the run goes on from its newest commit",
    "only": "checkpoint.load_only True: a run saves",
    "seed": "checkpoint.create_seed_checkpoint True",
    "part": r"checkpoint.exclude_from_loading \['lr_scheduler'\]: a resume restores everything",
    "export": "checkpoint.last_save_in_hf True: use rtj export",
    "elsewhere": "checkpoint.initial_load_model_only False: a run begins at step 0",
    "alone": "a SessionDataLoader is read by ResumableTrainer only",
    "memory": r'session={"extra": {"torchtitan": \.\.\.}}: that name is taken',
    "steps": r'session={"total_steps": \.\.\.}: it is training.steps of the config; session= takes .*, accept$',
    "behind": r"Trainer comes before Resumable, .*: write class Mine\(Resumable, Trainer\)",
}


def test_what_no_resume_would_survive_is_refused_by_name(lab: TitanLab) -> None:
    (said,) = lab.finished(lab.attempt(ALONE), "torchtitan_refusals_rank.py")
    assert said.keys() == REFUSED.keys()
    for name, words in REFUSED.items():
        assert re.search(words, said[name]), said[name]
