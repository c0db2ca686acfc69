"""A checkpoint that means something else than the script does is refused: every difference named, nothing started."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from in_process import rank_of
from rank_world import RankWorld, topology
from torch import nn

from trainer_sidecar.contract.journal import RestorePoint
from trainer_sidecar.contract.plan import CheckpointPolicy
from trainer_sidecar.train import ResumeRefused, Session, environment, refusal

pytestmark = pytest.mark.timeout(120)


class Words:
    def __len__(self) -> int:
        return 32

    def __getitem__(self, i: int) -> torch.Tensor:
        return (torch.arange(5) * (i + 1)) % 12


class Net(nn.Module):
    def __init__(self, words: int = 12, renamed: bool = False, layers: int = 1, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, 4)
        self.body = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))
        head = nn.Linear(4, words, bias=False)
        if tied:
            head.weight = self.embed.weight
        self.add_module("unembed" if renamed else "head", head)
        self.last = [head]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.body:
            x = torch.tanh(layer(x))
        out: torch.Tensor = self.last[0](x)
        return out


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


class Script:
    def __init__(
        self,
        model: nn.Module,
        optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
        scheduled: bool = True,
    ) -> None:
        self.model, self.optimizer = model, optimizer(model)
        self.options: dict[str, Any] = {}
        if scheduled:
            self.options["scheduler"] = torch.optim.lr_scheduler.StepLR(self.optimizer, 5)

    def session(self, steps: int) -> Session:
        made = {"model": self.model, "optimizer": self.optimizer, "data": Words(), **self.options}
        return Session.from_env(total_steps=steps, device="cpu", **made)

    def train(self, steps: int) -> None:
        with self.session(steps) as session:
            for ids in session.batches():
                logits = self.model(ids[:, :-1])
                loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                session.step_end(loss)


def in_bfloat16() -> nn.Module:
    model = Net()
    model.body.to(torch.bfloat16)
    return model


CHANGES: dict[str, tuple[Callable[[], Script], list[str]]] = {
    "added layer": (
        lambda: Script(Net(layers=2)),
        [
            "missing in the checkpoint: model/body.1.weight",
            "missing in the checkpoint: model/body.1.bias",
            "group 0 of optimizer 0 holds parameters as no group of the checkpoint does",
        ],
    ),
    "layer taken out": (
        lambda: Script(Net(layers=0)),
        [
            "not in this run, but in the checkpoint: model/body.0.weight",
            "not in this run, but in the checkpoint: model/body.0.bias",
        ],
    ),
    "other optimizer": (
        lambda: Script(Net(), lambda model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)),
        [
            "class of optimizer 0: AdamW in the checkpoint, SGD in this run",
            "fields of group 0 of optimizer 0: ",
            "'betas'",
            "'momentum'",
        ],
    ),
    "other vocabulary": (
        lambda: Script(Net(words=16)),
        [
            "shape of model/embed.weight: [12, 4] in the checkpoint, [16, 4] in this run",
            "shape of model/head.weight: [12, 4] in the checkpoint, [16, 4] in this run",
        ],
    ),
    "dtype": (
        lambda: Script(in_bfloat16()),
        [
            "dtype of model/body.0.weight: float32 in the checkpoint, bfloat16 in this run",
            "dtype of model/body.0.bias: float32 in the checkpoint, bfloat16 in this run",
        ],
    ),
    "renamed key": (
        lambda: Script(Net(renamed=True)),
        [
            "missing in the checkpoint: model/unembed.weight",
            "not in this run, but in the checkpoint: model/head.weight",
        ],
    ),
    "a group more": (
        lambda: Script(
            Net(),
            lambda m: torch.optim.AdamW(
                [{"params": m.embed.parameters()}, {"params": [*m.body.parameters(), *m.head.parameters()]}]
            ),
        ),
        [
            "groups of optimizer 0: 1 in the checkpoint, 2 in this run: make the groups of the checkpoint "
            "(add_param_group) before Session.from_env"
        ],
    ),
    "tied": (
        lambda: Script(Net(tied=True)),
        ["tied parameters: [] in the checkpoint, [['embed.weight', 'head.weight']] in this run"],
    ),
    "no scheduler": (
        lambda: Script(Net(), scheduled=False),
        ["number of schedulers: 1 in the checkpoint, 0 in this run"],
    ),
    "all at once": (
        lambda: Script(
            Net(words=16, layers=2, renamed=True), lambda m: torch.optim.SGD(m.parameters()), False
        ),
        [
            "shape of model/embed.weight",
            "model/body.1.weight",
            "model/unembed.weight",
            "model/head.weight",
            "class of optimizer 0",
            "number of schedulers",
        ],
    ),
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankWorld]:
    made = RankWorld(tmp_path_factory.mktemp("refused") / "run")
    yield made
    made.close()


@pytest.fixture(scope="module")
def point(world: RankWorld) -> RestorePoint:
    """Step 2 of the script as it was."""
    with pytest.MonkeyPatch.context() as patch:
        plan = world.attempt(topology(1, 4, micro=4), checkpoint=CheckpointPolicy(interval_seconds=0))
        with rank_of(world, plan, patch):
            Script(Net()).train(2)
    return world.commit_of(2)


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_meaning_is_refused_with_every_difference_and_nothing_is_touched(
    world: RankWorld, point: RestorePoint, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    build, sentences = CHANGES[change]
    script = build()
    before = [p.detach().clone() for p in script.model.parameters()]
    plan = world.attempt(topology(1, 4, micro=4), point, checkpoint=CheckpointPolicy(interval_seconds=0))
    with rank_of(world, plan, monkeypatch):
        with pytest.raises(ResumeRefused) as refused:
            script.session(4)
        outcome = json.loads((environment.join().outcome_dir / "rank-00000.json").read_text())
    for sentence in sentences:
        assert sentence in str(refused.value)
    assert outcome["kind"] == "ResumeRefused"
    assert sentences[0] in outcome["message"]
    assert all(map(torch.equal, before, script.model.parameters()))
    assert not script.optimizer.state
    assert not [c for c in world.commits() if c.epoch == plan.epoch]


def test_the_script_as_it_was_goes_on(
    world: RankWorld, point: RestorePoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = world.attempt(topology(1, 4, micro=4), point, checkpoint=CheckpointPolicy(interval_seconds=0))
    with rank_of(world, plan, monkeypatch):
        Script(Net()).train(4)
    assert world.commit_of(4).step == 4


@pytest.mark.parametrize("saved", [True, False])
def test_a_buffer_that_a_forward_pass_registers_ends_the_attempt_before_it_commits_what_no_resume_fits(
    world: RankWorld, monkeypatch: pytest.MonkeyPatch, saved: bool
) -> None:
    script = Script(Net())

    def register(module: nn.Module, *_: object) -> None:
        module.register_buffer("late", torch.ones(4), persistent=saved)

    script.model.register_forward_pre_hook(register)
    plan = world.attempt(topology(1, 4, micro=4), checkpoint=CheckpointPolicy(interval_seconds=0))
    with rank_of(world, plan, monkeypatch):
        if saved:
            with pytest.raises(
                ValueError, match=r"buffer late, float32\[4\], was not there when the session began"
            ):
                script.train(2)
        else:
            script.train(2)
        outcome = json.loads((environment.join().outcome_dir / "rank-00000.json").read_text())
    assert outcome["kind"] == ("Failed" if saved else "Finished")
    assert [c.step for c in world.commits() if c.epoch == plan.epoch] == ([] if saved else [2])


@pytest.mark.parametrize(
    ("rank", "told_elsewhere", "said"),
    [
        (0, False, "[rank0]: ResumeRefused: one\ntwo\n"),
        (1, False, "[rank1]: ResumeRefused: one (and 1 more in the outcome of the attempt)\n"),
        (0, True, "[rank0]: ResumeRefused, the reasons stand below\n"),
    ],
)
def test_a_refusal_that_ends_the_script_is_listed_once(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    rank: int,
    told_elsewhere: bool,
    said: str,
) -> None:
    others: list[BaseException] = []
    monkeypatch.setattr(refusal, "_installed", False)
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: others.append(error))
    monkeypatch.delenv("RTJ_TELLS_OUTCOME", raising=False)
    if told_elsewhere:
        monkeypatch.setenv("RTJ_TELLS_OUTCOME", "1")
    refusal.tell_once(rank)
    refused, other = ResumeRefused(["one", "two"]), ValueError("x")
    sys.excepthook(ResumeRefused, refused, None)
    sys.excepthook(ValueError, other, None)
    assert capsys.readouterr().err == said
    assert others == [other]
