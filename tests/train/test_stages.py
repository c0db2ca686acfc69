"""Pipeline stages and ZeRO-1 without processes: names over stages, who writes what, and the whole of the documents."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from trainer_sidecar.contract.checkpoint import TrainingState
from trainer_sidecar.contract.topology import Mesh
from trainer_sidecar.contract.whole import whole_training_state
from trainer_sidecar.train import Stage, extra_state, replicas, zero
from trainer_sidecar.train.capture import State
from trainer_sidecar.train.layout import REPLICATE, Layout, Placement
from trainer_sidecar.train.ownership import Entry, make_plan
from trainer_sidecar.train.stage import refuse_unproven
from trainer_sidecar.train.stage_names import meet_stages
from trainer_sidecar.train.whole import whole


class Exchange:
    """An agreement between the threads of a test: what each rank gathers, all get."""

    def __init__(self, world: int) -> None:
        self._said: list[bytes] = [b""] * world
        self._barrier = threading.Barrier(world, timeout=60)
        self.local = threading.local()

    def gather(self, data: bytes) -> list[bytes]:
        self._said[self.local.rank] = data
        self._barrier.wait()
        told = list(self._said)
        self._barrier.wait()
        return told


def on_ranks(states: list[State], work: Callable[[Exchange, State], Any]) -> list[Any]:
    """`work` on every rank's state at once: results, or the error that it raised."""
    exchange, found = Exchange(len(states)), [None] * len(states)

    def rank(number: int) -> None:
        exchange.local.rank = number
        try:
            found[number] = work(exchange, states[number])
        except Exception as error:
            found[number] = error  # type: ignore[call-overload]

    threads = [threading.Thread(target=rank, args=(n,)) for n in range(len(states))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    return found


def meet(states: list[State], fresh: bool = True) -> list[Any]:
    return on_ranks(states, lambda exchange, state: meet_stages(exchange, state, fresh=fresh))  # type: ignore[arg-type]


class Part(nn.Module):
    """A stage: a layer by the name `own`, and a buffer that every stage has."""

    def __init__(self, own: str, width: int = 3, scale: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleDict({own: nn.Linear(width, 2)})
        self.register_buffer("scale", torch.full((2,), scale))


def stages(*parts: nn.Module, stage: Stage | None = None, steps: int = 0) -> list[State]:
    """One rank per stage."""
    found = []
    for rank, part in enumerate(parts):
        optimizer = torch.optim.AdamW(part.parameters(), lr=0.1)
        for _ in range(steps):
            sum(p.sum() for p in part.parameters()).backward()  # type: ignore[union-attr]
            optimizer.step()
        mesh = (("pp", "dp"), (len(parts), 1))
        found.append(State(part, [optimizer], {}, len(parts), mesh, rank, stage))
    return found


def test_a_tensor_that_stages_share_is_written_once_and_compared_between_them() -> None:
    both = stages(Part("0"), Part("1"))
    assert meet(both) == [None, None]
    owned = []
    for rank, state in enumerate(both):
        captured = state.capture()
        plan = make_plan(captured.entries, rank, 2)
        owned += [plan.entries[o.entry].name for o in plan.owned]
        assert list(replicas.digests(captured, rank)) == ["model/scale"]
    assert sorted(owned) == [
        *("model/layers.0.bias", "model/layers.0.weight", "model/layers.1.bias", "model/layers.1.weight"),
        "model/scale",
    ]


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        (Part("0"), "model/layers.0.bias trains on the stages [0, 1]"),
        (
            Part("0", width=4),
            "model/layers.0.weight is float32[2, 3] on [1] [0] ['R'] on stage 0 and float32[2, 4]",
        ),
        (Part("1", scale=2.0), "model/scale differs between the stages"),
    ],
    ids=["trains on both", "another shape", "other bytes"],
)
def test_a_name_that_means_two_things_is_refused_on_every_rank_before_anything_is_saved(
    other: nn.Module, sentence: str
) -> None:
    for error in meet(stages(Part("0"), other)):
        assert isinstance(error, ValueError)
        assert sentence in str(error)
        assert "stage=Stage(names=" in str(error)


def test_what_stages_train_alike_is_declared_and_what_a_restore_makes_equal_need_not_be() -> None:
    tied = Stage(shared=["layers.0.weight", "layers.0.bias"])
    assert meet(stages(Part("0"), Part("0"), stage=tied)) == [None, None]
    assert meet(stages(Part("0"), Part("1", scale=2.0)), fresh=False) == [None, None]


def test_moments_lie_where_their_parameter_does() -> None:
    tied = Stage(shared=["layers.0.weight", "layers.0.bias"])
    both = stages(Part("0"), Part("0"), stage=tied, steps=1)
    meet(both)
    layouts = {e.name: e.layout.ranks for e in both[1].capture().entries}
    assert set(layouts.values()) == {(0, 1)}
    assert any(name.startswith("optimizer/0/layers.0.weight/") for name in layouts)


@pytest.mark.parametrize(
    ("names", "own", "expected"),
    [
        (None, "blocks.0.w", "blocks.0.w"),
        ({"blocks.1": "blocks.5"}, "blocks.1.w", "blocks.5.w"),
        ({"blocks.1": "blocks.5"}, "blocks.10.w", "blocks.10.w"),
        ({"blocks": "a", "blocks.1": "b"}, "blocks.1.w", "b.w"),
        ({"": "model"}, "head.w", "model.head.w"),
        ({"part": ""}, "part.head.w", "head.w"),
        (str.upper, "head.w", "HEAD.W"),
    ],
)
def test_names_of_a_stage_are_mapped_by_the_longest_prefix(names: Any, own: str, expected: str) -> None:
    assert Stage(names=names).name(own) == expected


def test_all_stages_together_say_what_a_run_without_stages_would_say() -> None:
    one = nn.Module()
    one.layers = nn.ModuleDict({"0": nn.Linear(3, 2), "1": nn.Linear(3, 2)})
    optimizer = torch.optim.AdamW(one.parameters(), lr=0.1)
    sum(p.sum() for p in one.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()
    alone = State(one, [optimizer], {}, 1)
    both = stages(Part("0"), Part("1"), steps=1)
    meet(both)

    def gathered(exchange: Any, state: State) -> Any:
        return whole(exchange, state, state.capture(), state.capture().only([]))

    expected = whole(None, alone, alone.capture(), alone.capture().only([]))  # type: ignore[arg-type]
    for found in on_ranks(both, gathered):
        assert found.state.optimizers == expected.state.optimizers
        assert sorted(found.state.trainable) == sorted(expected.state.trainable)
        assert found.tensors.keys() - expected.tensors.keys() == {"model/scale"}
        assert expected.tensors.keys() <= found.tensors.keys()


def test_stages_whose_groups_do_not_match_are_refused_by_name() -> None:
    both = stages(Part("0"), Part("1"))
    both[1].optimizers[0].add_param_group({"params": []})
    for error in meet(both):
        assert isinstance(error, ValueError)
        assert "optimizer 0 has 1 and 2 groups on the pipeline stages of rank 0 and rank 1" in str(error)


def test_objects_of_stages_are_united_and_a_list_that_mixes_them_is_refused() -> None:
    document = {"$ordered": [["a", {"$stored": "extra/o/a"}], ["b", {"$stored": "extra/o/b"}], ["n", 3]]}
    assert extra_state.targets(document, {"extra/o/b": torch.ones(2)}).keys() == {"b", "n"}
    with pytest.raises(ValueError, match="several pipeline stages"):
        extra_state.targets([{"$stored": "x"}, {"$stored": "y"}], {"x": torch.ones(2)})
    states = {i: s.capture() for i, s in enumerate(stages(Part("0"), Part("1")))}
    first = {"o": {"$ordered": [["a", {"$stored": "extra/o/a"}], ["n", 3]]}}
    second = {"o": {"$ordered": [["b", {"$stored": "extra/o/b"}], ["n", 4]]}}

    def told(extra: Any, rank: int) -> TrainingState:
        return TrainingState(optimizers=states[rank].optimizers, extra=extra)

    with pytest.raises(ValueError, match="extra/o/n differs between the pipeline stages"):
        whole_training_state({0: told(first, 0), 1: told(second, 1)})
    second["o"]["$ordered"][1][1] = 3
    joined = whole_training_state({0: told(first, 0), 1: told(second, 1)}).extra
    assert [key for key, _ in joined["o"]["$ordered"]] == ["a", "n", "b"]


def test_stages_that_saw_the_same_loss_that_is_no_number_fit_together() -> None:
    """One such loss stays in the statistics of the next 50 steps, and none of their saves must fail for it."""
    lost = float("nan")
    said = TrainingState(optimizers=[], statistics={"lossMean": lost, "lossStd": lost, "steps": 3}).to_bytes()
    stages = {rank: TrainingState.model_validate_json(said) for rank in (0, 1)}
    assert math.isnan(whole_training_state(stages).statistics["lossMean"])
    stages[1] = stages[1].model_copy(update={"statistics": {"lossMean": 1.0}})
    with pytest.raises(
        ValueError, match="statistics differ between the pipeline stages of rank 0 and rank 1"
    ):
        whole_training_state(stages)


def test_ranks_that_know_different_tensors_plan_every_byte_exactly_once() -> None:
    """Stages, tensors of some stages, and tensors of one rank alone, in one save; no rank sees the entries of all."""
    chance = random.Random(7)
    for _ in range(40):
        world = chance.choice([4, 6, 8])
        entries = [entry(chance, number, world) for number in range(chance.randint(1, 25))]
        stored: dict[str, Any] = {e.name: torch.zeros(e.shape, dtype=torch.int64) for e in entries}
        for rank in range(world):
            mine = tuple(e for e in entries if rank in e.layout.ranks)
            for owned in make_plan(mine, rank, world).owned:
                place = tuple(
                    slice(a, a + n) for a, n in zip(owned.place.start, owned.place.size, strict=True)
                )
                stored[mine[owned.entry].name][place] += 1
        assert all(bool((count == 1).all()) for count in stored.values())


def entry(chance: random.Random, number: int, world: int) -> Entry:
    half = world // 2
    ranks = chance.choice(
        [range(world), range(half), range(half, world), [0], [world - 1], range(1, world - 1)]
    )
    placement = chance.choice([REPLICATE, Placement(0)])
    shape = (chance.randint(1, 9), chance.randint(1, 4))
    return Entry(f"t{number}", "float32", 4, shape, Layout((len(ranks),), tuple(ranks), (placement,)))


def test_torch_still_has_what_zero_1_is_read_by() -> None:
    """ZeroRedundancyOptimizer says nothing of its state in public (datapath T15): another torch may break this."""
    has: Any = ZeroRedundancyOptimizer
    assert isinstance(has._param_to_rank, property)
    assert {"process_group", "_overlap_with_ddp", "_init_local_optimizer"} <= set(
        has.__init__.__code__.co_names
    )
    assert "optim" in has._init_local_optimizer.__code__.co_names
    plain = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    assert (zero.is_partitioned(plain), zero.stage_of(plain), zero.class_of(plain)) == (False, 0, "SGD")


def test_another_zero_stage_is_a_difference_but_on_one_rank_all_stages_are_the_same() -> None:
    saved, now = [{"zero": 1}], [{"zero": 3}]
    (said,) = zero.differences(saved, now, (4, 2))
    assert said.startswith("ZeRO stage of optimizer 0: 1 in the checkpoint, 3 in this run")
    assert zero.differences(saved, now, (4, 1)) == []
    assert zero.differences([{}], now, (4, 2)) == []  # saved before stages were told


def test_ddp_in_a_run_that_is_called_sharded_is_told_with_the_option_to_give() -> None:
    plain = [torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)]
    said = zero.mislabelled(plain, Mesh(dp=2))
    assert "this is DDP" in said
    assert "--zero 0 of rtj run, parallelism.zero: 0 of a job" in said
    assert zero.mislabelled(plain, Mesh(dp=2, zero=0)) == zero.mislabelled(plain, Mesh(dp=1)) == ""


@pytest.mark.parametrize(
    ("mesh", "said"),
    [
        (Mesh(dp=1, tp=2, pp=2), "tp 2 within pp 2"),
        (Mesh(dp=2, pp=2, zero=0), "ZeRO stage 0 within pp 2"),
        (Mesh(dp=2, pp=2, zero=1), "ZeRO stage 1 within pp 2"),
    ],
)
def test_a_mesh_that_no_test_holds_is_refused_by_name(mesh: Mesh, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        refuse_unproven(mesh)
    refuse_unproven(Mesh(dp=2, pp=2))
    refuse_unproven(Mesh(dp=1, pp=2, zero=0))
