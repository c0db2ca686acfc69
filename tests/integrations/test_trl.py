"""TRL's trainers, by the scripts of examples/: killed and resumed on other ranks, the same losses; and what of TRL's
settings works, or is refused by name. One parent for all."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from framework_runs import ALONE, PAIR, POLICY, Lab, samples
from rank_world import KEYS, ROOT

from trainer_sidecar import cli
from trainer_sidecar.contract.journal import RestorePoint
from trainer_sidecar.contract.plan import Plan
from trainer_sidecar.store.forks import Fork, choose_source, source_journal
from trainer_sidecar.train.extra_state import targets

pytestmark = [pytest.mark.torchrun, pytest.mark.slow, pytest.mark.timeout(600)]
STEPS, EVERY = 9, 4
RANK = "example_rank.py"
BRIEF = ("--max_steps", str(STEPS), "--learning_rate", "0.01", "--warmup_steps", "2", "--max_length", "64")


class TrlLab(Lab):
    imports = ("peft", "trl", "trl.trainer.sft_trainer", "trl.trainer.dpo_trainer", *Lab.imports)

    def attempt(self, where: Any, restore: RestorePoint | None = None) -> Plan:
        policy = POLICY.model_copy(update={"interval_steps": EVERY})
        return self.world.attempt(where, restore, checkpoint=policy)

    def example(self, name: str, *options: str, kill: int = 0) -> dict[str, str]:
        """Environment of a rank that runs an example's script."""
        folder = ROOT / "examples" / name
        return {
            "EXAMPLE": str(folder),
            "EXAMPLE_ARGS": json.dumps([*BRIEF, *options]),
            "EXAMPLE_KILL": str(kill),
        }

    def losses(self, plan: Plan) -> dict[int, float]:
        """Mean over the ranks by step, as their ledgers have it."""
        found: dict[int, list[float]] = {}
        for path in sorted(self.world.ledger.glob(f"job-e{plan.epoch}-r*.jsonl")):
            for line in map(json.loads, path.read_text().splitlines()):
                if line["kind"] == "step":
                    found.setdefault(line["step"], []).append(line["loss"])
        return {step: sum(each) / len(each) for step, each in found.items()}

    def history(self, plan: Plan, key: str) -> dict[int, float]:
        """What Trainer logged under a name by step, as the attempt's last commit has it."""
        kept = targets(self.manifest(self.commits(plan)[-1]).training_state.extra["trainer"], {})
        return {entry["step"]: entry[key] for entry in kept["log_history"] if key in entry}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrlLab]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")  # TRL tells its makers of each start
        made = TrlLab(tmp_path_factory.mktemp("trl"))
        yield made
        made.close()


WAYS: dict[str, tuple[Any, Any, tuple[str, ...]]] = {
    "sft": (PAIR, ALONE, ()),
    "lora": (ALONE, PAIR, ("--dropout", "0", "--packing", "True", "--max_length", "48")),
    "dpo": (PAIR, ALONE, ("--sync_ref_model", "True", "--ref_model_sync_steps", "3")),
    "dpo ": (ALONE, PAIR, ("--lora", "True")),
}
"""An example, the ranks that it begins and ends on, and options."""


@pytest.mark.parametrize("way", WAYS)
def test_an_example_that_is_killed_goes_on_on_other_ranks_with_the_same_losses(lab: TrlLab, way: str) -> None:
    name, (before, after, options) = way.strip(), WAYS[way]
    control = lab.attempt(before)
    lab.finished(control, RANK, **lab.example(name, *options))
    assert [c.step for c in lab.commits(control)] == [4, 8, STEPS]
    killed = lab.attempt(before)
    assert -9 in lab.run(killed, RANK, **lab.example(name, *options, kill=8))
    (newest,) = lab.commits(killed)
    assert newest.step == 4
    resumed = lab.attempt(after, lab.point(newest))
    report = lab.finished(resumed, RANK, **lab.example(name, *options))[0]
    assert report["verified"] is True, report
    assert report["resharded"] is True
    assert lab.samples(resumed) == {s: i for s, i in lab.samples(control).items() if s > newest.step}
    keys = {"loss": 1e-4, "grad_norm": 1e-3, "learning_rate": 0, "num_tokens": 0, "epoch": 0}
    for key, close in keys.items():
        wanted, found = lab.history(control, key), lab.history(resumed, key)
        assert list(wanted) == [*range(1, STEPS + 1)], key
        assert found == pytest.approx(wanted, rel=close), key


def test_log_probabilities_computed_ahead_need_the_same_reference_at_every_start(
    lab: TrlLab, tmp_path: Path
) -> None:
    ahead = ("--precompute_ref_log_probs", "True")
    control = lab.attempt(ALONE)
    lab.finished(control, RANK, **lab.example("dpo", *ahead))
    fourth, _, last = lab.commits(control)
    resumed = lab.attempt(ALONE, lab.point(fourth))
    (report,) = lab.finished(resumed, RANK, **lab.example("dpo", *ahead))
    assert report["verified"] is True, report
    assert lab.history(resumed, "loss") == lab.history(control, "loss")
    manifests = [lab.manifest(c) for c in (last, lab.commits(resumed)[-1])]
    assert manifests[0].state_digest == manifests[1].state_digest
    assert manifests[0].fingerprints["training.beta"] == "0.1"
    assert manifests[0].fingerprints["model.reference"].startswith("sha256:")
    other = lab.attempt(ALONE, lab.point(fourth))  # another reference, and another setting of the loss
    changed = {"EXAMPLE_OTHER": "1"}
    assert lab.run(other, RANK, **changed, **lab.example("dpo", *ahead, "--beta", "0.2")) != [0]
    said = lab.log(other)
    assert re.search(r"fingerprint model.reference: sha256:\w+ in the checkpoint, .* \(refused\)", said), said
    assert re.search(
        r"fingerprint training.beta: 0.1 in the checkpoint, 0.2 in this run \(needs consent", said
    )
    point = imported(lab, tmp_path)
    started = lab.attempt(ALONE, point)
    assert lab.run(started, RANK, **lab.example("dpo", *ahead)) != [0]
    assert "log-probabilities were computed with the weights that the script made" in lab.log(started)


def test_continued_pretraining_begins_from_the_import_and_resumes_its_own_on_other_ranks(
    lab: TrlLab, tmp_path: Path
) -> None:
    point = imported(lab, tmp_path)
    options = ("--base", str(tmp_path / "base"), "--steps", str(STEPS), "--context", "32", "--lr", "0.01")
    environment = {**lab.example("continued-pretraining"), "EXAMPLE_ARGS": json.dumps(options)}
    forgotten = lab.attempt(ALONE)
    assert lab.run(forgotten, RANK, **environment) == [1]
    assert re.search(r"nothing was restored, .*: start with `rtj run --resume-from", lab.log(forgotten))
    assert lab.commits(forgotten) == []
    control = lab.attempt(PAIR, point)
    report = lab.finished(control, RANK, **environment)[0]
    assert "weights only" in {check["name"] for check in report["checks"]}
    killed = lab.attempt(PAIR, point)
    assert -9 in lab.run(killed, RANK, **{**environment, "EXAMPLE_KILL": "8"})
    (newest,) = lab.commits(killed)
    resumed = lab.attempt(ALONE, lab.point(newest))
    (report,) = lab.finished(resumed, RANK, **environment)
    assert report["verified"] is True, report
    assert lab.samples(resumed) == {s: i for s, i in lab.samples(control).items() if s > newest.step == 4}
    wanted, found = lab.losses(control), lab.losses(resumed)
    assert found == pytest.approx({s: loss for s, loss in wanted.items() if s > 4}, rel=1e-4)
    assert wanted[STEPS] < wanted[1]


def imported(lab: TrlLab, folder: Path) -> RestorePoint:
    """The tiny model with other weights, as `rtj import` puts them into the store: where a run begins from it."""
    run_id = f"base-{folder.name}"
    assert lab.run(lab.attempt(ALONE), "tiny_base_rank.py", TINY_BASE=str(folder / "base")) == [0]
    where = ["--store", lab.world.store.url, "--namespace", KEYS.namespace, "--run-id", run_id]
    assert cli.main(["import", str(folder / "base"), *where]) == 0
    fork = Fork(KEYS.namespace, run_id)
    history = source_journal(lab.world.journal, fork).read()
    return choose_source(history, fork, lab.world.journal.refresh())


def test_log_probabilities_computed_ahead_are_of_the_model_without_the_adapters_that_are_trained(
    lab: TrlLab,
) -> None:
    ready = {"EXAMPLE_READY": "1", **lab.example("dpo", "--precompute_ref_log_probs", "True")}
    control = lab.attempt(ALONE)
    lab.finished(control, RANK, **ready)
    fourth = lab.commits(control)[0]
    resumed = lab.attempt(ALONE, lab.point(fourth))
    (report,) = lab.finished(resumed, RANK, **ready)
    assert report["verified"] is True, report
    assert lab.history(resumed, "loss") == lab.history(control, "loss")
    other = lab.attempt(ALONE, lab.point(fourth))
    assert lab.run(other, RANK, EXAMPLE_OTHER="1", **ready) != [0]
    assert re.search(r"fingerprint model.reference: .* \(refused\)", lab.log(other)), lab.log(other)


REFUSED = {
    "streaming": "train_dataset is an IterableDataset, .*load_dataset without streaming",
    "best": "load_best_model_at_end: its folders are gone with the pod",
    "average": "BEMACallback: its running averages are in no save",
    "arguments": r"SFT needs args=TrainingArguments\(\.\.\.\), or its own kind \(SFTConfig",
    "generates": "GRPOTrainer has an order of samples of its own",
    "pairs": "KTOTrainer has an order of samples of its own",
    "plain": "SFTConfig 4 x 2",
}


def test_what_no_resume_of_trl_would_survive_is_refused_by_name(lab: TrlLab) -> None:
    (said,) = lab.finished(lab.attempt(ALONE), "trl_refusals_rank.py", **lab.example("sft"))
    assert said.keys() == REFUSED.keys()
    for name, words in REFUSED.items():
        assert re.search(words, said[name]), said[name]


def test_the_samples_of_the_page_train_to_their_end(lab: TrlLab, tmp_path: Path) -> None:
    texts = [text for text in samples("transformers.md", "python") if "from trl" in text]
    found = []
    for text, name in zip(texts, ("sft", "dpo"), strict=True):
        folder = str(ROOT / "examples" / name)
        path = tmp_path / f"{name}.py"
        path.write_text(
            f"import os, sys\nos.chdir({str(tmp_path)!r})\nsys.path.insert(0, {folder!r})\n" + text
        )
        attempt = lab.attempt(ALONE)
        assert lab.run(attempt, str(path)) == [0], lab.log(attempt)
        found.append(lab.commits(attempt)[-1].step)
    assert found == [4, 5]
