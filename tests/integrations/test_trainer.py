"""Trainer and Accelerate, killed and resumed: same samples, same losses, on other ranks as well; and the samples of
their page. One parent for all."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from framework_runs import ALONE, PAIR, POLICY, Lab, samples
from rank_world import KEYS
from safetensors.torch import load_file, save_file

from rtj_operator.api import parse_job
from rtj_operator.api.effective import OperatorDefaults, effective
from rtj_operator.mesh import MeshPlan
from rtj_operator.mesh import plan as plan_mesh
from trainer_sidecar import cli
from trainer_sidecar.contract.outcome import OutcomeKind
from trainer_sidecar.contract.plan import Plan
from trainer_sidecar.store.forks import Fork, choose_source, source_journal

pytestmark = [pytest.mark.torchrun, pytest.mark.slow, pytest.mark.timeout(600)]
STEPS = 7
"""Three passes over 20 samples in batches of 8; an epoch ends in steps 3 and 5."""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    made = Lab(tmp_path_factory.mktemp("trainer"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def control(lab: Lab) -> tuple[Plan, list[dict[str, Any]]]:
    plan = lab.attempt(PAIR)
    return plan, lab.finished(plan, "trainer_rank.py")


def history(rank: dict[str, Any], key: str) -> dict[int, float]:
    """What Trainer logged under a name, by step."""
    return {entry["step"]: entry[key] for entry in rank["history"] if key in entry}


def patience(lab: Lab, plan: Plan) -> int:
    """Evaluations without progress, as the attempt's last commit has it."""
    kept = json.dumps(lab.manifest(lab.commits(plan)[-1]).training_state.extra["trainer"])
    return int(kept.partition('"early_stopping_patience_counter", ')[2][0])


def test_trainer_in_the_sessions_order_saves_logs_and_evaluates_as_it_always_does(
    lab: Lab, control: tuple[Plan, list[dict[str, Any]]]
) -> None:
    plan, ranks = control
    assert [c.step for c in lab.commits(plan)] == [2, 4, 6, STEPS]
    assert lab.outcome(plan) is OutcomeKind.FINISHED
    first = ranks[0]
    assert (first["step"], first["epoch"], first["folders"]) == (STEPS, STEPS * 8 / 20, [])
    assert first["saved_before"] is True
    at_ends = [[what, s] for s in (3, 5, 7) for what in ("epoch", "evaluated")]
    assert first["events"] == [["evaluated", 0], *at_ends]
    assert list(history(first, "loss")) == list(range(1, STEPS + 1))
    assert history(first, "learning_rate")[1] < history(first, "learning_rate")[2]
    in_order = [i for step in sorted(lab.samples(plan)) for i in lab.samples(plan)[step]]
    assert sorted(in_order[:40]) == sorted([*range(20)] * 2)
    told = lab.manifest(lab.commits(plan)[-1]).fingerprints
    assert told["training.learning_rate"] == "0.01"
    assert told["model.hidden_size"] == "32"
    assert "training.per_device_train_batch_size" not in told
    said = "a step has 8 samples, the plan's global batch (--global-batch of rtj run"
    assert lab.log(plan).count(said) == 1, "by rank 0"
    assert "per_device_train_batch_size 64 x gradient_accumulation_steps 1 on 2 ranks, which make 128" in (
        lab.log(plan)
    )


def test_a_killed_trainer_goes_on_with_the_next_sample_on_another_world_size_and_is_verified(
    lab: Lab, control: tuple[Plan, list[dict[str, Any]]]
) -> None:
    plan, ranks = control
    killed = lab.attempt(PAIR)
    assert -9 in lab.run(killed, "trainer_rank.py", TRAINER_KILL="5")
    newest = lab.commits(killed)[-1]
    assert newest.step in (2, 4)
    resumed = lab.attempt(ALONE, lab.point(newest))
    (found,) = lab.finished(resumed, "trainer_rank.py")
    report = found["resume"]
    assert report["verified"] is True, report
    assert report["resharded"] is True
    assert all(check["passed"] for check in report["checks"])
    assert lab.samples(resumed) == {s: i for s, i in lab.samples(plan).items() if s > newest.step}
    for key, close in (
        ("loss", 1e-5),
        ("grad_norm", 1e-4),
        ("learning_rate", 0),
        ("eval_loss", 1e-4),
        ("epoch", 0),
        ("num_input_tokens_seen", 0),
    ):
        assert history(found, key) == pytest.approx(history(ranks[0], key), rel=close), key
    assert found["flos"] == pytest.approx(ranks[0]["flos"], rel=0.2)  # padding counts
    assert patience(lab, resumed) == patience(lab, plan) == 2
    assert [e for e in ranks[0]["events"] if e[1] > newest.step] == found["events"]


def test_on_the_same_ranks_it_goes_on_bit_for_bit_also_after_orders_in_an_evaluations_step_and_in_a_window(
    lab: Lab, control: tuple[Plan, list[dict[str, Any]]]
) -> None:
    plan, ranks = control
    second, _, _, last = lab.commits(plan)
    ordered = lab.attempt(PAIR, lab.point(second))
    path = lab.world.volume.order(ordered.epoch)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("SaveAndExit")
    lab.finished(ordered, "trainer_rank.py")
    assert lab.outcome(ordered) is OutcomeKind.SAVED_AND_STOPPED
    (stopped,) = lab.commits(ordered)
    assert stopped.step == 3
    hasty = POLICY.model_copy(update={"grace_seconds": 0.001})
    cut = lab.world.attempt(PAIR, lab.point(stopped), checkpoint=hasty)
    (left, _) = lab.finished(cut, "trainer_rank.py", TRAINER_ORDER="5")
    assert lab.outcome(cut) is OutcomeKind.SAVED_AND_STOPPED
    assert [c.step for c in lab.commits(cut)] == [4, 5]
    inside = lab.commits(cut)[-1]
    assert lab.manifest(inside).training_state.accumulation == {"discarded": 4}, "a micro batch of two ranks"
    assert left["tokens"] > history(ranks[0], "num_input_tokens_seen")[5], "which was counted"
    again = lab.attempt(PAIR, lab.point(inside))
    found = lab.finished(again, "trainer_rank.py")
    for key in ("loss", "eval_loss", "num_input_tokens_seen"):
        assert history(found[0], key) == history(ranks[0], key)
    for key in ("flos", "tokens", "micro", "counting"):
        assert found[0][key] == ranks[0][key], key
    assert found[0]["tokens"] == sum(4 + i % 5 for step in lab.samples(plan).values() for i in step)
    assert found[0]["micro"] == STEPS
    kept = f"('last', ({STEPS}, 'done')), ('mean', tensor([3.5000, 3.5000])), ('micro', {STEPS}), "
    kept += "('steps', {1, 2, 3, 4, 5, 6, 7}), ('sums', array([7., 7.]))"
    assert f"('by_step', {{1: 1, 2: 2, 3: 3, 4: 4, 5: 5, 6: 6, 7: 7}}), {kept}" in found[0]["counting"]
    assert lab.manifest(lab.commits(again)[-1]).state_digest == lab.manifest(last).state_digest


def test_a_run_that_a_callback_ended_trains_no_further_when_it_is_started_again_unless_it_is_told_to(
    lab: Lab,
) -> None:
    stops = {"TRAINER_STOP": "2"}
    plan = lab.attempt(ALONE)
    (first,) = lab.finished(plan, "trainer_rank.py", **stops)
    (last,) = lab.commits(plan)
    assert (last.step, first["step"], lab.outcome(plan)) == (2, 2, OutcomeKind.FINISHED)
    again = lab.attempt(ALONE, lab.point(last))  # as one that was killed before it told of its end
    (found,) = lab.finished(again, "trainer_rank.py", **stops)
    assert (lab.samples(again), lab.outcome(again)) == ({}, OutcomeKind.FINISHED)
    assert found["history"][: len(first["history"]) - 1] == first["history"][:-1]  # the last: its seconds
    assert found["events"] == [["epoch", 2]], "and is not judged again"
    assert "the run was ended early at step 2" in lab.log(again)
    told = lab.attempt(ALONE, lab.point(last))
    (found,) = lab.finished(told, "trainer_rank.py", TRAINER_MORE="1")
    assert sorted(lab.samples(told)) == [3, 4, 5], "until patience ends, which step 2 is counted in"
    assert found["step"] == 5


def test_lora_with_dropout_goes_on_bit_for_bit_also_with_releases_that_have_new_settings(lab: Lab) -> None:
    plan = lab.attempt(PAIR)
    ranks = lab.finished(plan, "trainer_rank.py", TRAINER_LORA="1")
    second = lab.commits(plan)[0]
    again = lab.attempt(PAIR, lab.point(second))
    found = lab.finished(again, "trainer_rank.py", TRAINER_LORA="1", TRAINER_NEWER="1")
    new = ("my_new_option", "my_new_list", "peft.default.my_new_form")
    told = {check["name"]: check["detail"] for check in found[0]["resume"]["checks"]}
    assert {told[f"fingerprint training.{name}"] for name in new} == {"harmless"}
    assert history(found[0], "loss") == history(ranks[0], "loss")
    manifests = [lab.manifest(lab.commits(p)[-1]) for p in (plan, again)]
    assert manifests[0].state_digest == manifests[1].state_digest
    assert all("lora_" in name for name in manifests[0].training_state.trainable)
    assert manifests[0].fingerprints["training.peft.default.lora_alpha"] == "8"
    assert "training.peft.default.peft_version" not in manifests[0].fingerprints


def test_a_loop_with_accelerate_goes_on_on_another_world_size(lab: Lab) -> None:
    plan = lab.attempt(PAIR)
    control = lab.finished(plan, "accelerate_rank.py")[0]["steps"]
    second = lab.commits(plan)[0]
    resumed = lab.attempt(ALONE, lab.point(second))
    (found,) = lab.finished(resumed, "accelerate_rank.py")
    assert found["resume"]["verified"] is True
    assert lab.samples(resumed) == {s: i for s, i in lab.samples(plan).items() if s > second.step}
    after = {step: pair for step, pair in control.items() if int(step) > second.step}
    assert found["steps"].keys() == after.keys()
    for step, pair in found["steps"].items():
        assert pair == pytest.approx(after[step], rel=1e-4)


def test_every_sample_of_the_page_but_those_of_trl_trains_to_its_end(lab: Lab, tmp_path: Path) -> None:
    shared, *scripts = samples("transformers.md", "python")
    (tmp_path / "my_training.py").write_text(shared)
    here = f"import os, sys\nos.chdir({str(tmp_path)!r})\nsys.path.insert(0, os.getcwd())\n"
    found = []
    for number, text in enumerate(script for script in scripts if "from trl" not in script):  # test_trl.py
        path = tmp_path / f"train{number}.py"
        path.write_text(here + text)
        attempt = lab.attempt(ALONE)
        assert lab.run(attempt, str(path)) == [0], lab.log(attempt)
        found.append(lab.commits(attempt)[-1].step)
        if "NewRate" in text:
            path.write_text(here + text.replace("learning_rate=1e-3", "learning_rate=4e-3"))
            again = lab.attempt(ALONE, lab.point(lab.commits(attempt)[0]))
            assert lab.run(again, str(path)) == [0], lab.log(again)
            newest = lab.manifest(lab.commits(again)[-1])
            (optimizer,) = newest.training_state.optimizers
            assert {group["fields"]["initial_lr"] for group in optimizer["groups"]} == {4e-3}
            assert newest.fingerprints["training.learning_rate"] == "0.004"
    assert found == [8, 6, 4, 3, 5]  # two passes over 32 samples in batches of 8; four ends by steps


@pytest.mark.parametrize("page", ["transformers.md", "import.md"])
def test_the_job_of_the_page_can_be_planned(page: str) -> None:
    (text,) = samples(page, "yaml")
    spec = effective(parse_job(yaml.safe_load(text)), OperatorDefaults())
    assert isinstance(plan_mesh(spec.mesh, spec.mesh.nodes), MeshPlan)


def test_a_dcp_folder_of_several_ranks_is_imported_with_each_shard_in_its_place(
    lab: Lab, tmp_path: Path
) -> None:
    assert lab.run(lab.attempt(PAIR), "dcp_rank.py", DCP_FOLDER=str(tmp_path / "dcp")) == [0, 0]
    assert len(list((tmp_path / "dcp").glob("*.distcp"))) == 2
    where = ["--store", lab.world.store.url, "--run-id", "sharded"]
    assert cli.main(["import", str(tmp_path / "dcp"), "--strip", "model.", *where]) == 0
    assert cli.main(["export", "--to", str(tmp_path / "out"), *where]) == 0
    found = load_file(tmp_path / "out" / "tensors.safetensors")
    whole = [[7.0 * row + column for column in range(7)] for row in range(5)]
    assert {name: tensor.tolist() for name, tensor in found.items()} == dict.fromkeys(
        ("rows", "columns", "all"), whole
    )


def test_ranks_that_shard_a_model_start_from_imported_weights_each_with_its_part(
    lab: Lab, tmp_path: Path
) -> None:
    shapes = {"0.weight": (7, 5), "0.bias": (7,), "2.weight": (5, 7), "2.bias": (5,)}
    weights = {name: torch.randn(shape) for name, shape in shapes.items()}
    save_file(weights, tmp_path / "model.safetensors")
    where = ["--store", lab.world.store.url, "--namespace", KEYS.namespace, "--run-id", "weights"]
    assert cli.main(["import", str(tmp_path), *where]) == 0
    fork = Fork(KEYS.namespace, "weights")
    point = choose_source(source_journal(lab.world.journal, fork).read(), fork, lab.world.journal.refresh())
    plan = lab.attempt(PAIR, point)
    assert lab.run(plan, "sharded_start_rank.py") == [0, 0], lab.log(plan)
    found = load_file(lab.world.out / "start.safetensors")
    assert {name: tensor.tolist() for name, tensor in found.items()} == {
        name: tensor.tolist() for name, tensor in weights.items()
    }
    assert lab.commits(plan)[-1].step == 4


REFUSED = {
    "best": "load_best_model_at_end: its folders are gone with the pod",
    "jit": "enable_jit_checkpoint: SIGTERM is the session's",
    "batch": "auto_find_batch_size: the plan says the batch",
    "order": "the session decides the order",
    "hooks": "optim adalomo: its state lives in hooks",
    "window": "accumulationSave raw: .* use boundary",
    "mesh": "the mesh is dp1xtp2xpp1/zero3, and Trainer's loop knows data parallel only",
    "arguments": r"ResumableTrainer needs args=TrainingArguments\(\.\.\.\)",
    "path": "the run goes on from its newest commit",
    "trial": "give each trial a run of its own",
    "forwards": "train_dataset is an IterableDataset",
    "twice": "would divide the loss a second time",
    "scheduled": "as many steps as there are processes",
    "between": r"Weighs comes before Resumable, .*: write class Mine\(ResumableTrainer, Weighs\)",
    "bases": r"Mine\(Weighs, Resumable\): Weighs comes before Resumable, .*: write class Mine\(Resumable, Weighs\)",
    "alone": r"Mine has no transformers' Trainer among its bases: class Mine\(Resumable, Trainer\)",
    "object": "of the attributes in state\\(\\) of callback Odd, handle is a builtins.object, which cannot be saved",
    "accelerate": "Trainer cannot be resumed so: .*num_steps 4: the accumulation is the plan's",
    "one": "^2 micro batches$",
    "masks": r"DataCollatorForLanguageModeling\(seed=7\) draws from a generator of its own, .*: leave seed out",
    "memory": r'session={"extra": {"trainer": \.\.\.}}: that name is taken by what the trainer itself keeps',
    "reference": r'session={"extra": {"ref_model": \.\.\.}}: that name is taken',
    "seed": r'session={"seed": \.\.\.}: it is data_seed of the arguments, or seed; session= takes extra, per_rank, ',
    "nonsense": r'session={"nonsense": \.\.\.}; session= takes extra, per_rank, fingerprints, accept$',
    "weighs": "the train loader's order is that of a WeightedRandomSampler",
    "prepares": "the train loader's order is that of a WeightedRandomSampler",
    "before": r"Before.get_train_dataloader gives Trainer a loader of its own",
    "hides": r"Hides.get_train_dataloader gives Trainer a loader of its own",
    "epoch": "begun anew in step 2: a callback has set control.should_epoch_stop",
}


def test_what_no_resume_would_survive_is_refused_by_name(lab: Lab) -> None:
    (said,) = lab.finished(lab.attempt(ALONE), "refusals_rank.py")
    assert said.keys() == REFUSED.keys()
    for name, words in REFUSED.items():
        assert re.search(words, said[name]), said[name]
