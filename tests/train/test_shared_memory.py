"""Buffers whose memory is not simply their elements are saved, and a resume puts them back, or says which cannot be."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from in_process import Parts, rank_of
from rank_world import RankWorld, topology
from torch import nn

from trainer_sidecar.contract.plan import CheckpointPolicy
from trainer_sidecar.train import ResumeRefused, checksum
from trainer_sidecar.train.shared_memory import overlaps

pytestmark = pytest.mark.timeout(120)
POLICY = CheckpointPolicy(interval_seconds=0)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankWorld]:
    made = RankWorld(tmp_path_factory.mktemp("shared") / "run")
    yield made
    made.close()


def buffers(fill: float) -> dict[str, torch.Tensor]:
    """The same forms for each `fill`, other values."""
    row = torch.arange(4, dtype=torch.float32) + fill
    turned = torch.complex(row, row + 1).conj()
    with torch.inference_mode():
        guarded = row.clone()
    return {
        "expanded": row[:1].expand(4),
        "rows": row.expand(3, 4),
        "column": row[:, None].expand(4, 3),
        "bits": torch.tensor([fill > 1]).expand(5),
        "windows": (torch.arange(10.0) + fill).unfold(0, 3, 1),
        "conjugated": turned,
        "negated": turned.imag,
        "guarded": guarded,
    }


def parts(held: dict[str, torch.Tensor]) -> Parts:
    made = Parts(nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)))
    for name, tensor in held.items():
        made.model.register_buffer(name, tensor)
    still = torch.full((2, 2), 1 + 2j, dtype=torch.complex64).conj()
    made.model.register_parameter("still", nn.Parameter(still, requires_grad=False))
    return made


def test_they_are_saved_and_put_back_in_their_own_form(
    world: RankWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rank_of(world, world.attempt(topology(1, 4, micro=4), checkpoint=POLICY), monkeypatch):
        first = parts(buffers(1.0))
        with first.session(total_steps=2) as session:
            first.train(session)
    point = world.commit_of(2)
    expected, other = buffers(1.0), buffers(5.0)
    with rank_of(world, world.attempt(topology(1, 4, micro=4), point, checkpoint=POLICY), monkeypatch):
        second = parts(other)
        with second.session(total_steps=3) as session:
            assert session.resume is not None
            assert session.resume.passed
            second.train(session)
    for name, tensor in other.items():
        assert second.model.get_buffer(name) is tensor
        assert torch.equal(tensor, expected[name]), name
        assert tensor.stride() == expected[name].stride(), name
        assert (tensor.is_conj(), tensor.is_neg()) == (name == "conjugated", name == "negated")

    spread = {**buffers(1.0), "rows": torch.arange(12.0).reshape(3, 4), "windows": torch.zeros(8, 3)}
    with rank_of(world, world.attempt(topology(1, 4, micro=4), checkpoint=POLICY), monkeypatch):
        third = parts(spread)
        with third.session(total_steps=4) as session:
            third.train(session)
    plan = world.attempt(topology(1, 4, micro=4), world.commit_of(4), checkpoint=POLICY)
    with rank_of(world, plan, monkeypatch), pytest.raises(ResumeRefused) as refused:
        parts(buffers(1.0)).session(total_steps=5)
    assert refused.value.differences[0].startswith("model/rows has several elements in one place of memory")
    assert ".clone() it" in refused.value.differences[0]
    assert len(refused.value.differences) == 1  # zeros everywhere do fit windows that share them


@pytest.mark.parametrize(
    ("tensor", "told"),
    [
        (torch.ones(3, 4).t(), False),
        (torch.ones(4, 6)[::2, 1:5:3], False),
        (torch.ones(0, 4), False),
        (torch.ones(1, 3).expand(1, 3), False),
        (torch.ones(()), False),
        (torch.ones(1).expand(2), True),
        (torch.ones(3, 1, 2).expand(3, 5, 2), True),
        (torch.ones(5).unfold(0, 2, 1), True),
        (torch.ones(6).unfold(0, 2, 2), False),
        (torch.as_strided(torch.ones(9), (2, 3), (2, 1)), True),
    ],
)
def test_elements_in_one_place_are_seen(tensor: torch.Tensor, told: bool) -> None:
    assert overlaps(tensor) is told


def test_a_checksum_is_of_the_values_also_where_memory_holds_their_conjugates() -> None:
    values = torch.complex(torch.arange(4.0), torch.arange(4.0) + 1)
    turned = values.conj()
    sums = checksum.checksums([values, turned, turned.resolve_conj(), turned.imag, turned.imag.resolve_neg()])
    assert sums[1] == sums[2] != sums[0]
    assert sums[3] == sums[4]
