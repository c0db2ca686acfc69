"""A script may have made another device the default one: tensors of the library's own say where they are."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import rank_of
from rank_world import RankWorld, topology
from torch import nn
from torch.utils._device import _device_constructors

import trainer_sidecar
from trainer_sidecar.dcp.host_copy import HostCopy
from trainer_sidecar.train import Session
from trainer_sidecar.train.checksum import _factors, checksums

pytestmark = pytest.mark.timeout(120)
PACKAGE = Path(trainer_sidecar.__file__).parent
MODULES = sorted(p for folder in ("train", "dcp") for p in (PACKAGE / folder).glob("*.py"))
CONSTRUCTORS = {function.__name__ for function in _device_constructors()}


def _unplaced(path: Path) -> list[str]:
    """Calls like `torch.zeros(…)` without `device=`."""
    calls = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
    return [
        f"{path.name}: {ast.unparse(call)}"
        for call in calls
        if isinstance(call.func, ast.Attribute)
        and isinstance(call.func.value, ast.Name)
        and call.func.value.id == "torch"
        and call.func.attr in CONSTRUCTORS
        and "device" not in {keyword.arg for keyword in call.keywords}
    ]


def test_every_tensor_that_the_library_makes_says_where() -> None:
    assert {"zeros", "empty", "tensor", "randint", "arange"} <= CONSTRUCTORS
    assert [found for path in MODULES for found in _unplaced(path)] == []


def test_a_session_saves_and_resumes_under_another_default_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`meta` stands for `cuda` here: what lands on it by mistake cannot be read."""
    world = RankWorld(tmp_path / "run")
    try:
        first = _train(world, monkeypatch, 2)
        again = _train(world, monkeypatch, 3)
    finally:
        world.close()
    assert first.resume is None
    assert again.resume is not None
    assert again.resume.step == 2


class _Row:
    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.full((1,), i / 64, device="cpu")


def _train(world: RankWorld, monkeypatch: pytest.MonkeyPatch, steps: int) -> Session:
    commits = world.commits()
    point = world.commit_of(commits[-1].step) if commits else None
    model = nn.Linear(1, 4, device="cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    counter: dict[str, Any] = {"seen": torch.zeros(3, device="cpu"), "none": torch.zeros(0, device="cpu")}
    with rank_of(world, world.attempt(topology(1, 4), point), monkeypatch), torch.device("meta"):
        _factors.cache_clear()
        session = Session.from_env(
            model=model,
            optimizer=optimizer,
            data=_Row(),
            total_steps=steps,
            extra={"counter": _Counter(counter)},
            device="cpu",
        )
        with session:
            for batch in session.batches():
                loss = model(batch).square().mean() / session.accumulation
                loss.backward()
                if session.micro_end(loss):
                    continue
                optimizer.step()
                optimizer.zero_grad()
                session.step_end()
    assert session.step == steps
    return session


class _Counter:
    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def test_checksums_and_copies_are_made_on_the_host() -> None:
    tensor = torch.ones(3)
    _factors.cache_clear()
    with torch.device("meta"):
        (found,) = checksums([tensor])
        copy = HostCopy(keep=True).take({"a": tensor})
    _factors.cache_clear()
    assert checksums([tensor]) == (found,)
    assert torch.equal(copy["a"], tensor)
