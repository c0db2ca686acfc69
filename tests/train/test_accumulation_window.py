"""How the rest of an interrupted accumulation window is shared out: nothing lost, nothing twice, on any mesh."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer_sidecar.contract.topology import Batch, Mesh, Topology
from trainer_sidecar.train.window import Split, Window, consumed, micro_steps_left, offsets, remaining


def topology(dp: int, size: int, batch: int) -> Topology:
    shape = Batch(global_batch_size=batch, micro_batch_size=size, accumulation=batch // dp // size)
    return Topology(nodes=1, ranks_per_node=dp, mesh=Mesh(dp=dp), batch=shape)


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


@st.composite
def interruptions(draw: st.DrawFn) -> list[tuple[Topology, int]]:
    """Meshes that take the window over in turn, each with the micro steps that it does before it is interrupted."""
    batch = draw(st.sampled_from([8, 12, 16, 24]))
    found = []
    for _ in range(draw(st.integers(1, 4))):
        dp = draw(st.sampled_from(divisors(batch)))
        found.append(
            (topology(dp, draw(st.sampled_from(divisors(batch // dp))), batch), draw(st.integers(0, 3)))
        )
    return found


@settings(max_examples=60, deadline=None)
@given(interruptions())
def test_every_sample_of_a_window_is_taken_once_whatever_meshes_take_it_over(
    taken_over: list[tuple[Topology, int]],
) -> None:
    splits: tuple[Split, ...] = ()
    seen: list[int] = []
    for where, wanted in taken_over:
        left = micro_steps_left(where, splits)
        if left is None:
            continue  # this mesh cannot split the rest: it would run the whole window again
        window = Window(micro=where.batch.accumulation - left, began=where.batch.accumulation - left)
        last = (where, wanted) is taken_over[-1]
        for _ in range(left if last else min(wanted, left - 1)):
            for rank in range(where.mesh.dp):
                took = offsets(where, splits, rank, window.micro)
                assert len(took) == where.batch.micro_batch_size
                seen += took.tolist()
            window.micro += 1
        splits = window.splits(where, splits)
        assert consumed(splits) == len(seen)
    batch = taken_over[0][0].batch.global_batch_size
    assert sorted([*seen, *remaining(np.arange(batch), splits).tolist()]) == list(range(batch))


def test_the_same_mesh_goes_on_with_exactly_the_micro_steps_that_were_left() -> None:
    where = topology(2, 2, 16)
    whole = [[offsets(where, (), rank, micro).tolist() for micro in range(4)] for rank in range(2)]
    assert whole == [[[0, 1], [2, 3], [4, 5], [6, 7]], [[8, 9], [10, 11], [12, 13], [14, 15]]]
    rest = (Split(2, 2, 3),)
    assert micro_steps_left(where, rest) == 1
    assert [offsets(where, rest, rank, 3).tolist() for rank in range(2)] == [[6, 7], [14, 15]]


def test_a_rest_that_does_not_make_whole_micro_steps_cannot_be_split() -> None:
    assert micro_steps_left(topology(4, 2, 16), (Split(2, 2, 1),)) is None  # 12 samples, 8 a micro step
    assert micro_steps_left(topology(3, 4, 12), (Split(2, 3, 1),)) is None  # 6 samples, 12 a micro step
    assert micro_steps_left(topology(4, 1, 16), (Split(2, 2, 1),)) == 3
    assert Split.of(Split(2, 2, 1).document()) == Split(2, 2, 1)
