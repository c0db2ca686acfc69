"""Lightning's Trainer, killed and resumed: same samples, same losses, on other ranks as well; the samples of its page;
and what is refused. One parent for all."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from framework_runs import ALONE, PAIR, POLICY, SCRIPTS, Lab
from rank_world import KEYS, ROOT
from safetensors.torch import save_file

from trainer_sidecar import cli
from trainer_sidecar.contract.journal import RestorePoint, SaveReason
from trainer_sidecar.contract.outcome import OutcomeKind
from trainer_sidecar.contract.plan import Plan
from trainer_sidecar.store.forks import Fork, choose_source, source_journal

pytestmark = [pytest.mark.torchrun, pytest.mark.slow, pytest.mark.timeout(600)]
STEPS = 7
"""Three passes over 20 samples in batches of 8; an epoch ends in steps 3, 5 and 7."""


class LightningLab(Lab):
    """Its parent has imported Lightning."""

    def run(self, plan: Plan, script: str, **env: str) -> list[int]:
        imports = ("trainer_sidecar.integrations.lightning",)
        return self.warm.run(self.world, plan, str(SCRIPTS / script), imports=imports, **env)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LightningLab]:
    made = LightningLab(tmp_path_factory.mktemp("lightning"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def control(lab: LightningLab) -> tuple[Plan, list[dict[str, Any]]]:
    plan = lab.attempt(PAIR)
    return plan, lab.finished(plan, "lightning_rank.py")


def history(rank: dict[str, Any], name: str, after: int = 0) -> dict[int, float]:
    """What Lightning logged under a name, by steps done; `after`: of those behind that step."""
    told = {step + 1: metrics[name] for step, metrics in rank["lines"] if name in metrics}
    return {step: value for step, value in told.items() if step > after}


def heard(folder: Path, files: str, key: str, after: int = 0) -> dict[int, float]:
    """What the sessions of these ledgers heard of each step behind `after`: means over all ranks."""
    found: dict[int, list[float]] = {}
    for path in sorted(folder.glob(files)):
        for line in map(json.loads, path.read_text().splitlines()):
            if line["kind"] == "step" and line["step"] > after:
                found.setdefault(line["step"], []).append(line[key])
    return {step: sum(values) / len(values) for step, values in found.items()}


def ledger(lab: LightningLab, plan: Plan, key: str, after: int = 0) -> dict[int, float]:
    return heard(lab.world.ledger, f"job-e{plan.epoch}-r*.jsonl", key, after)


def events(rank: dict[str, Any], after: int = 0) -> list[list[Any]]:
    """What callbacks saw behind a step, but for the beginnings of epochs."""
    return [e for e in rank["events"] if e[2] > after and e[0] != "epoch begins"]


def test_lightning_in_the_sessions_order_saves_logs_and_validates_as_it_always_does(
    lab: LightningLab, control: tuple[Plan, list[dict[str, Any]]]
) -> None:
    plan, ranks = control
    assert [c.step for c in lab.commits(plan)] == [2, 4, 6, STEPS]
    assert lab.outcome(plan) is OutcomeKind.FINISHED
    first = ranks[0]
    assert (first["step"], first["epoch"], first["planned"]) == (STEPS, 3, STEPS)
    assert (first["strategy"], first["files"], first["saved_before"]) == ("DDPStrategy", [], True)
    assert events(first) == [
        ["validated", 0, 2],
        ["epoch", 0, 3],
        ["validated", 1, 5],
        ["epoch", 1, 5],
        ["validated", 2, 7],
        ["epoch", 2, 7],
    ]
    assert first["events"][0] == ["sanity", 0, 0]
    assert list(history(first, "loss_step")) == list(range(1, STEPS + 1))
    in_order = [i for step in sorted(lab.samples(plan)) for i in lab.samples(plan)[step]]
    assert sorted(in_order[:40]) == sorted([*range(20)] * 2)
    manifest = lab.manifest(lab.commits(plan)[-1])
    assert manifest.fingerprints["training.hparams.rate"] == "0.02"
    assert manifest.fingerprints["training.gradient_clip_val"] == "0.5"
    assert "batch_size 64 x accumulate_grad_batches 1 on 2 ranks, which make 128" in lab.log(plan)


def test_a_killed_run_goes_on_inside_its_epoch_on_another_world_size_and_is_verified(
    lab: LightningLab, control: tuple[Plan, list[dict[str, Any]]]
) -> None:
    plan, (first, _) = control
    killed = lab.attempt(PAIR)
    assert -9 in lab.run(killed, "lightning_rank.py", LIGHTNING_KILL="6")
    newest = lab.commits(killed)[-1]
    assert newest.step == 4, "one step of the second epoch is done, one is left"
    resumed = lab.attempt(ALONE, lab.point(newest))
    (found,) = lab.finished(resumed, "lightning_rank.py")
    report = found["resume"]
    assert report["verified"] is True, report
    assert report["resharded"] is True
    assert all(check["passed"] for check in report["checks"])
    assert lab.samples(resumed) == {s: i for s, i in lab.samples(plan).items() if s > 4}
    for key in ("loss", "gradNorm"):
        assert ledger(lab, resumed, key) == pytest.approx(ledger(lab, plan, key, after=4), rel=1e-4), key
    for name in ("lr-AdamW", "val_loss", "epoch", "loss_epoch"):
        expected = history(first, name, after=4)
        assert expected, name
        assert history(found, name) == pytest.approx(expected, rel=1e-4), name
    assert found["events"][0] == ["epoch begins", 1, 4], "no sanity check, no validation of step 4 again"
    assert events(found) == events(first, after=4)
    assert (found["step"], found["epoch"], found["waited"]) == (STEPS, 3, first["waited"])
    assert found["strategy"] == "SingleDeviceStrategy"
    assert found["seen"] == 4 * 4 + 3 * 8, "a hook's own count, of rank 0, goes on"


def imported(lab: LightningLab, folder: Path) -> RestorePoint:
    """A model that answers 0 to everything, as `rtj import` puts it into the store."""
    folder.mkdir()
    shapes = {"0.weight": (16, 6), "0.bias": (16,), "2.weight": (1, 16), "2.bias": (1,)}
    weights = {f"layers.{name}": torch.zeros(shape) for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors")
    where = ["--store", lab.world.store.url, "--namespace", KEYS.namespace, "--run-id", "base"]
    assert cli.main(["import", str(folder), *where]) == 0
    fork = Fork(KEYS.namespace, "base")
    history = source_journal(lab.world.journal, fork).read()
    return choose_source(history, fork, lab.world.journal.refresh())


def test_a_run_begins_from_imported_weights_with_its_sanity_check_and_goes_on_from_its_own_commit(
    lab: LightningLab, tmp_path: Path
) -> None:
    began = lab.attempt(ALONE, imported(lab, tmp_path / "base"))
    (first,) = lab.finished(began, "lightning_rank.py", LIGHTNING_ROWS="18")
    assert "weights only" in {check["name"] for check in first["resume"]["checks"]}
    assert first["events"][:2] == [["sanity", 0, 0], ["epoch begins", 0, 0]]
    assert (first["step"], first["epoch"], first["seen"]) == (6, 3, 6 * 8)
    rows = torch.tensor(lab.samples(began)[1]).unsqueeze(1) + 1
    wanted = torch.cos(torch.arange(6.0) * rows).sum(1).sin().square().mean().item()
    assert ledger(lab, began, "loss")[1] == pytest.approx(wanted, rel=1e-5)
    again = lab.attempt(ALONE, lab.point(lab.commits(began)[1]))
    (found,) = lab.finished(again, "lightning_rank.py", LIGHTNING_ROWS="18")
    assert history(found, "loss_step") == history(first, "loss_step", after=4)
    assert found["seen"] == first["seen"]
    done = lab.attempt(ALONE, lab.point(lab.commits(again)[-1]))
    (found,) = lab.finished(done, "lightning_rank.py", LIGHTNING_ROWS="18")
    assert (found["step"], found["events"]) == (6, []), "epochs of 3, 2 and 1 steps, validated each 2"


@pytest.mark.parametrize(
    ("begin", "stops"), [(0, range(1, 3)), (2, [3])], ids=["inside an epoch", "at its end"]
)
def test_after_an_order_that_min_epochs_would_ignore_it_goes_on_bit_for_bit_on_the_same_ranks(
    lab: LightningLab, control: tuple[Plan, list[dict[str, Any]]], begin: int, stops: Sequence[int]
) -> None:
    plan, (first, _) = control
    commits = lab.commits(plan)
    ordered = lab.attempt(PAIR, lab.point(commits[0]) if begin else None)
    path = lab.world.volume.order(ordered.epoch)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("SaveAndExit")
    stopping = lab.finished(ordered, "lightning_rank.py")
    assert lab.outcome(ordered) is OutcomeKind.SAVED_AND_STOPPED
    (stopped,) = lab.commits(ordered)
    assert stopped.step in stops
    expected = [e for e in events(first, after=begin) if e[2] <= stopped.step]
    assert events(stopping[0], after=begin) == expected, "an epoch that was not over was not ended"
    again = lab.attempt(PAIR, lab.point(stopped))
    found = lab.finished(again, "lightning_rank.py")
    for name in ("loss_step", "val_loss", "lr-AdamW", "worst"):
        assert history(found[0], name) == history(first, name, after=stopped.step), name
    for name in ("loss_epoch", "of_rank_0"):
        means = history(first, name, after=stopped.step)
        assert means, name
        assert history(found[0], name) == pytest.approx(means, rel=1e-6), f"{name}: sums in another order"
    assert events(found[0]) == events(first, after=stopped.step)
    assert lab.manifest(lab.commits(again)[-1]).state_digest == lab.manifest(commits[-1]).state_digest


def test_an_order_that_cuts_a_window_saves_sums_and_counts_of_its_start(
    lab: LightningLab, control: tuple[Plan, list[dict[str, Any]]]
) -> None:
    _, (first, _) = control
    slow = POLICY.model_copy(update={"grace_seconds": 60, "interval_steps": 0})
    cut = lab.world.attempt(PAIR, checkpoint=slow)
    lab.world.volume.order(cut.epoch).parent.mkdir(parents=True, exist_ok=True)
    stopped = lab.finished(cut, "lightning_rank.py", LIGHTNING_ORDER="1")[0]
    assert lab.outcome(cut) is OutcomeKind.SAVED_AND_STOPPED
    (commit,) = lab.commits(cut)
    assert (commit.step, commit.reason) == (1, SaveReason.ORDER)
    assert stopped["seen"] == 4 + 2, "one of the two micro batches of the second step went on"
    again = lab.attempt(PAIR, lab.point(commit))
    found = lab.finished(again, "lightning_rank.py")[0]
    assert found["resume"]["reprocessedSamples"] == 4
    assert found["seen"] == first["seen"] == STEPS * 4
    assert history(found, "loss_step") == history(first, "loss_step", after=1)
    for name in ("loss_epoch", "of_rank_0", "worst", "val_loss"):
        assert history(found, name) == pytest.approx(history(first, name, after=1), rel=1e-6), name
    assert events(found) == events(first, after=1)
    assert (found["waited"], found["step"]) == (first["waited"], STEPS)


def test_the_scaler_of_16_bit_precision_goes_on_bit_for_bit(lab: LightningLab) -> None:
    plan = lab.attempt(ALONE)
    (first,) = lab.finished(plan, "lightning_rank.py", LIGHTNING_SCALER="1")
    again = lab.attempt(ALONE, lab.point(lab.commits(plan)[1]))
    (found,) = lab.finished(again, "lightning_rank.py", LIGHTNING_SCALER="1")
    assert found["scale"] == first["scale"] == 2.0**8, "doubled every third step, twice"
    assert history(found, "loss_step") == history(first, "loss_step", after=4)
    digests = [lab.manifest(lab.commits(p)[-1]).state_digest for p in (plan, again)]
    assert digests[0] == digests[1]


def test_fsdp2_goes_on_on_another_world_size(
    lab: LightningLab, control: tuple[Plan, list[dict[str, Any]]]
) -> None:
    unsharded, (first, _) = control
    plan = lab.attempt(PAIR)
    sharded = lab.finished(plan, "lightning_rank.py", LIGHTNING_FSDP="1")[0]
    assert sharded["strategy"] == "ModelParallelStrategy"
    for key in ("loss", "gradNorm"):
        assert ledger(lab, plan, key) == pytest.approx(ledger(lab, unsharded, key), rel=1e-4), key
    resumed = lab.attempt(ALONE, lab.point(lab.commits(plan)[1]))
    (found,) = lab.finished(resumed, "lightning_rank.py", LIGHTNING_FSDP="1")
    assert found["resume"]["verified"] is True
    assert lab.samples(resumed) == {s: i for s, i in lab.samples(plan).items() if s > 4}
    assert ledger(lab, resumed, "loss") == pytest.approx(ledger(lab, plan, "loss", after=4), rel=1e-4)
    for name in ("val_loss", "loss_epoch"):
        assert history(found, name) == pytest.approx(history(first, name, after=4), rel=1e-4), name


def rtj_run(folder: Path, ranks: int, **env: str) -> subprocess.Popen[str]:
    """`rtj run` of the script, whose events come as JSON lines on stderr."""
    mesh = ("--nproc", str(ranks), "--zero", "0", "--global-batch", "8", "--max-micro-batch", "2")
    saves = ("--interval-steps", "2", "--interval-seconds", "0", "--ledger", str(folder))
    script = SCRIPTS / "lightning_rank.py"
    command = ["run", "--store", f"file://{folder}/store", "--run-id", "lit", *mesh, *saves, "--json"]
    return subprocess.Popen(
        [sys.executable, "-m", "trainer_sidecar.cli", *command, "--", str(script)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "TINY_OUT": str(folder), **env},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


def test_rtj_run_whose_rank_and_self_are_killed_goes_on_by_the_same_command_on_fewer_ranks(
    lab: LightningLab, control: tuple[Plan, list[dict[str, Any]]], tmp_path: Path
) -> None:
    with rtj_run(tmp_path, 2, LIGHTNING_KILL="5") as first:
        assert first.stderr is not None
        told = []
        for line in first.stderr:
            told.append(line)
            if "AttemptEnded" in line:
                break
        first.kill()
    assert "AttemptEnded" in told[-1], "".join(told)
    with rtj_run(tmp_path, 1) as second:
        said = second.communicate(timeout=400)[1]
    assert second.returncode == 0, said
    (path,) = tmp_path.glob("lightning-e*-r0.json")
    found = json.loads(path.read_text())
    restored = found["resume"]["step"]
    assert restored in (2, 4)
    assert found["resume"]["verified"] is True
    epoch = found["resume"]["epoch"]
    before = heard(tmp_path, "lit-e1-r*.jsonl", "loss")
    after = heard(tmp_path, f"lit-e{epoch}-r*.jsonl", "loss")
    joined = {step: loss for step, loss in before.items() if step <= restored} | after
    assert joined == pytest.approx(ledger(lab, control[0], "loss"), rel=1e-4)
    assert (found["step"], found["epoch"]) == (STEPS, 3)


def samples(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "docs/lightning.md").read_text(), flags=re.DOTALL)


def test_every_sample_of_the_page_trains_to_its_end(lab: LightningLab, tmp_path: Path) -> None:
    shared, *scripts = samples("python")
    (tmp_path / "my_training.py").write_text(shared)
    here = f"import os, sys\nos.chdir({str(tmp_path)!r})\nsys.path.insert(0, os.getcwd())\n"
    found = []
    for number, text in enumerate(scripts):
        path = tmp_path / f"train{number}.py"
        path.write_text(here + text)
        attempt = lab.attempt(ALONE)
        assert lab.run(attempt, str(path)) == [0], lab.log(attempt)
        found.append(lab.commits(attempt)[-1].step)
    assert found == [8, 6, 4]  # two passes over 32 samples in batches of 8; two ends by steps


def test_a_run_that_stopped_early_says_so_when_it_is_started_again_and_goes_on_by_min_steps(
    lab: LightningLab,
) -> None:
    ended = lab.attempt(ALONE)
    (first,) = lab.finished(ended, "lightning_rank.py", LIGHTNING_EARLY="1")
    assert first["step"] == 5, "the second validation, of the second epoch, is not better"
    again = lab.attempt(ALONE, lab.point(lab.commits(ended)[-1]))
    (found,) = lab.finished(again, "lightning_rank.py", LIGHTNING_EARLY="1")
    assert (found["step"], found["events"]) == (5, [])
    assert "the run was stopped early at step 5" in lab.log(again)
    assert lab.outcome(again) is OutcomeKind.FINISHED
    longer = lab.attempt(ALONE, lab.point(lab.commits(ended)[-1]))
    (found,) = lab.finished(longer, "lightning_rank.py", LIGHTNING_EARLY="6")
    assert found["step"] >= 6
    assert "stopped early" not in lab.log(longer)


REFUSED = {
    "fast": "fast_dev_run True: .* use plain Trainer",
    "overfit": "overfit_batches 2: the session decides which samples come",
    "limit": "limit_train_batches 3: it counts batches of one rank",
    "validates": r"limit_val_batches 3: it counts batches of one rank.* or a fraction \(0.1\)",
    "seats": "plugin LightningEnvironment: which rank sits where is told by rtj",
    "reload": "reload_dataloaders_every_n_epochs 1: .* use a Mixture",
    "clock": "val_check_time_interval 600.0: by time ranks and attempts would .* give steps",
    "fsdp1": r"strategy FSDPStrategy: FSDP1 flattens parameters.*use ModelParallelStrategy \(FSDP2\)",
    "sizes": "tensor_parallel_size 2: leave them out, the mesh is dp1xtp1xpp1",
    "precision": "precision plugin Own: what it keeps is not saved",
    "spawn": "strategy ddp_spawn: ranks are started by rtj, use ddp",
    "averages": "model_averaging_period: their state is in the hook",
    "hardware": "accelerator tpu: the session knows cpu and cuda",
    "schedule": "callback GradientAccumulationScheduler: the accumulation is the plan's",
    "swa": "callback StochasticWeightAveraging: it keeps weights of its own",
    "ema": "callback EMAWeightAveraging: it keeps weights of its own.*'extra'",
    "unfreeze": "callback BackboneFinetuning: .* groups of parameters",
    "prune": "callback ModelPruning: .* changes names",
    "exception": "callback OnExceptionCheckpoint: the session saves",
    "window": "accumulationSave raw: .* use boundary",
    "mesh": "the mesh is dp1xtp2xpp1/zero3, and this integration knows data parallel only",
    "alone": "strategy SingleDeviceStrategy on 2 ranks would train as many models: use ddp",
    "bases": "Mine has no Lightning Trainer among its bases",
    "memory": r'session={"extra": {"lightning": \.\.\.}}: that name is taken',
    "steps": r'session={"total_steps": \.\.\.}: it is max_steps of Trainer; session= takes .*, accept, seed$',
    "behind": r"Trainer comes before Resumable, .*: write class Mine\(Resumable, Trainer\)",
    "path": r"fit\(ckpt_path='last'\): the run goes on from its newest commit",
    "manual": "automatic_optimization=False: .* Write the loop with a Session",
    "iterator": r"training_step\(dataloader_iter\): it would read ahead",
    "frequency": "lr_scheduler frequency 5 with interval 'step' counts micro batches",
    "finder": "callback LearningRateFinder: it trains before the run begins",
    "forwards": "the train loader reads an IterableDataset",
    "several": "the train loader is a list: give one DataLoader",
    "in order": "the train loader's order is that of a SequentialSampler.*say so by shuffle=True",
    "weighted": "the train loader's order is that of a WeightedRandomSampler.*in a Mixture",
    "batches": r"a batch_sampler of its own \(Batches\)",
    "seldom": "val_check_interval 3 steps: an epoch may have 2, and would not be validated. Use at most 2",
    "few": "6 samples of an epoch cannot fill a global batch of 8",
}
WHILE_TRAINING = {
    "rewrites": "on_save_checkpoint changes state_dict, loops, callbacks of the checkpoint",
    "skips": "an epoch ended before its last batch: on_train_batch_start returned -1",
    "nothing": "training_step returned None: a batch that is left out",
}


def test_what_no_resume_would_survive_is_refused_by_name(lab: LightningLab) -> None:
    (said,) = lab.finished(lab.attempt(ALONE), "lightning_refusals_rank.py")
    for name, words in REFUSED.items():
        assert re.search(words, said.get(name, "")), (name, said.get(name))
    assert said.keys() == REFUSED.keys()


@pytest.mark.parametrize("name", sorted(WHILE_TRAINING))
def test_what_only_training_shows_ends_the_attempt_with_its_name(lab: LightningLab, name: str) -> None:
    attempt = lab.attempt(ALONE)
    (said,) = lab.finished(attempt, "lightning_refusals_rank.py", LIGHTNING_LAST=name)
    assert re.search(WHILE_TRAINING[name], said[name])
    assert lab.outcome(attempt) is OutcomeKind.FAILED
