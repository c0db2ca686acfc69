"""The planner: exact products, exact batches, the same answer twice, and never less for more nodes."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rtj_operator import mesh
from rtj_operator.api import CompatibilityEntry
from rtj_operator.mesh import (
    MeshPlan,
    MeshSpec,
    Refusal,
    RefusalReason,
    largest_divisor,
    plan,
    plan_size,
    plan_table,
    transition,
    workable_sizes,
)
from trainer_sidecar.contract.topology import Mesh, Topology

SEED = MeshSpec(nodes=8, ranks_per_node=8, global_batch=384, min_nodes=2, max_nodes=8, tp=8)
"""64 GPUs as dp 8 x tp 8."""


def entry(from_: dict[str, object], to: dict[str, object], status: str = "verified") -> CompatibilityEntry:
    return CompatibilityEntry.model_validate({"from": from_, "to": to, "status": status})


@st.composite
def specs(draw: st.DrawFn) -> MeshSpec:
    low = draw(st.integers(1, 6))
    high = draw(st.integers(low, 12))
    allowed = draw(st.lists(st.integers(low, high), max_size=5, unique=True))
    pairs = st.tuples(st.sampled_from((1, 2, 3, 4, 8)), st.sampled_from((1, 2, 4)))
    tp, pp = draw(pairs)
    return MeshSpec(
        nodes=draw(st.integers(low, high)),
        ranks_per_node=draw(st.sampled_from((1, 2, 4, 6, 8))),
        global_batch=draw(st.sampled_from((1, 7, 96, 360, 384, 512, 1000))),
        min_nodes=low,
        max_nodes=high,
        sizes=tuple(sorted(allowed)),
        tp=tp,
        pp=pp,
        zero=draw(st.sampled_from((0, 1, 3))),
        alternatives=tuple(draw(st.lists(pairs, max_size=2))),
        max_micro_batch=draw(st.none() | st.integers(1, 64)),
    )


@st.composite
def restores(draw: st.DrawFn, spec: MeshSpec) -> Topology | None:
    """Nothing to resume, or a topology that the same spec could have saved on (or one of another ZeRO stage)."""
    found = [p for n in workable_sizes(spec) if isinstance(p := plan_size(spec, n), Topology)]
    if not found or draw(st.booleans()):
        return None
    return draw(st.sampled_from(found))


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_a_plan_uses_its_ranks_and_its_batch_exactly(data: st.DataObject) -> None:
    spec = data.draw(specs())
    available = data.draw(st.integers(0, 14))
    found = plan(spec, available, data.draw(restores(spec)))
    if isinstance(found, Refusal):
        assert found.sentence
        return
    mesh, batch, nodes = found.topology.mesh, found.topology.batch, found.topology.nodes
    assert mesh.dp * mesh.tp * mesh.pp == nodes * spec.ranks_per_node
    assert mesh.dp * batch.micro_batch_size * batch.accumulation == spec.global_batch
    assert batch.micro_batch_size <= spec.micro_batch_limit
    assert spec.min_nodes <= nodes <= min(available, spec.max_nodes)
    assert not spec.sizes or nodes in spec.sizes
    assert nodes + found.idle_nodes == min(available, spec.max_nodes)
    assert bool(found.note) == bool(found.idle_nodes)


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_the_same_question_gets_the_same_answer_and_more_nodes_never_a_smaller_plan(
    data: st.DataObject,
) -> None:
    spec = data.draw(specs())
    saved = data.draw(restores(spec))
    last = 0
    for available in range(15):
        found = plan(spec, available, saved)
        assert found == plan(spec, available, saved)
        used = found.topology.nodes if isinstance(found, MeshPlan) else 0
        assert used >= last, f"{available} nodes give {used}, one fewer gave {last}"
        last = used


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_a_plan_never_crosses_a_forbidden_transition(data: st.DataObject) -> None:
    spec = data.draw(specs())
    saved = data.draw(restores(spec))
    found = plan(spec, data.draw(st.integers(1, 12)), saved)
    if isinstance(found, MeshPlan) and saved is not None:
        assert (found.topology.mesh.tp, found.topology.mesh.pp) == (saved.mesh.tp, saved.mesh.pp)
        assert found.topology.mesh.zero == saved.mesh.zero


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_a_refusal_names_sizes_that_do_work(data: st.DataObject) -> None:
    spec = data.draw(specs())
    found = plan_size(spec, data.draw(st.integers(1, 14)))
    if isinstance(found, Refusal):
        assert all(isinstance(plan_size(spec, n), Topology) for n in found.nearest)
        assert bool(found.nearest) == bool(workable_sizes(spec))


@given(st.integers(1, 5000), st.integers(1, 5000))
@settings(max_examples=200, deadline=None)
def test_the_largest_divisor_is_found(number: int, limit: int) -> None:
    assert largest_divisor(number, limit) == max(
        d for d in range(1, number + 1) if number % d == 0 and d <= limit
    )


def test_64_to_48_gpus_resumes_when_the_batch_divides_by_both() -> None:
    full = plan(SEED, 8)
    assert isinstance(full, MeshPlan)
    assert str(full.topology.mesh) == "dp8xtp8xpp1/zero3"
    assert (full.topology.batch.micro_batch_size, full.topology.batch.accumulation) == (48, 1)
    fewer = plan(SEED, 6, full.topology)
    assert isinstance(fewer, MeshPlan)
    assert str(fewer.topology.mesh) == "dp6xtp8xpp1/zero3"
    assert fewer.topology.batch.model_dump() == {
        "global_batch_size": 384,
        "micro_batch_size": 32,
        "accumulation": 2,
    }
    assert fewer.idle_nodes == 0


def test_64_to_48_gpus_leaves_16_idle_when_the_batch_does_not_divide_by_6() -> None:
    spec = replace(SEED, global_batch=512)
    full = plan(spec, 8)
    assert isinstance(full, MeshPlan)
    fewer = plan(spec, 6, full.topology)
    assert isinstance(fewer, MeshPlan)
    assert (fewer.topology.nodes, fewer.topology.mesh.dp, fewer.idle_nodes) == (4, 4, 2)
    assert fewer.note == (
        "4 nodes used, 2 nodes idle: 6 nodes x 8 ranks = 48 ranks gives dp 6, which does not divide "
        "batch.globalBatchSize 512; the nearest sizes that work: 4, 8"
    )
    exact = plan_size(spec, 6)
    assert isinstance(exact, Refusal)
    assert (exact.reason, exact.nearest) == (RefusalReason.BATCH_NOT_DIVISIBLE, (4, 8))


def test_the_micro_batch_defaults_to_that_at_the_wanted_size_so_that_no_size_needs_more_memory() -> None:
    for size, found in plan_table(SEED):
        assert isinstance(found, Refusal) == (384 % size != 0)
        if isinstance(found, Topology):
            assert found.batch.micro_batch_size <= 48


def test_dp_alone_may_change_unless_an_entry_blocks_it() -> None:
    wide, narrow = Mesh(dp=8, tp=8, zero=1), Mesh(dp=6, tp=8, zero=1)
    assert transition(wide, narrow) is None
    blocked = entry(
        {"dp": 8, "tp": 8, "zero": 1}, {"dp": 6, "tp": 8, "zero": 1}, "blocked_until_drill_passes"
    )
    refused = transition(wide, narrow, [blocked])
    assert refused is not None
    assert refused.reason == RefusalReason.TRANSITION_BLOCKED
    assert "dp8xtp8xpp1/zero1" in refused.sentence
    assert "drill" in refused.sentence


def test_tp_and_pp_change_only_by_a_verified_entry() -> None:
    saved, wanted = Mesh(dp=8, tp=8, zero=1), Mesh(dp=8, tp=4, pp=2, zero=1)
    unlisted = transition(saved, wanted)
    assert unlisted is not None
    assert unlisted.reason == RefusalReason.TRANSITION_NOT_LISTED
    pair = ({"dp": 8, "tp": 8, "zero": 1}, {"dp": 8, "tp": 4, "pp": 2, "zero": 1})
    assert transition(saved, wanted, [entry(*pair)]) is None
    assert transition(saved, wanted, [entry(*pair, "blocked_until_drill_passes")]) is not None
    assert transition(wanted, saved, [entry(*pair)]) is not None, "an entry has a direction"


def test_the_first_entry_that_matches_decides_and_a_star_matches_any() -> None:
    saved, wanted = Mesh(dp=8, tp=8), Mesh(dp=16, tp=4)
    anything = entry({"tp": "*", "pp": "*"}, {"tp": "*", "pp": "*"})
    exact_block = entry({"dp": 8, "tp": 8}, {"dp": 16, "tp": 4}, "blocked_until_drill_passes")
    assert transition(saved, wanted, [anything, exact_block]) is None
    assert transition(saved, wanted, [exact_block, anything]) is not None
    no_pp = entry({"tp": 8}, {"tp": 4})
    assert transition(saved, Mesh(dp=8, tp=4, pp=2), [no_pp]) is not None, "pp left out means 1, not any"


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_another_zero_stage_is_refused_even_when_listed(stage: int) -> None:
    saved, wanted = Mesh(dp=4, zero=3), Mesh(dp=4, zero=stage)
    refused = transition(saved, wanted, [entry({"zero": 3}, {"zero": stage})])
    assert refused is not None
    assert refused.reason == RefusalReason.ZERO_STAGE_CHANGED
    assert "parallelism.zero back to 3" in refused.sentence


def test_an_alternative_is_used_where_the_first_choice_does_not_fit_and_the_matrix_allows_it() -> None:
    spec = MeshSpec(
        nodes=3, ranks_per_node=4, global_batch=24, min_nodes=1, max_nodes=3, tp=8, alternatives=((4, 1),)
    )
    first = plan(spec, 3)
    assert isinstance(first, MeshPlan)
    assert (first.topology.mesh.dp, first.topology.mesh.tp) == (3, 4)
    on_two = plan(spec, 2)
    assert isinstance(on_two, MeshPlan)
    assert on_two.topology.mesh.tp == 8, "the first choice fits on two nodes"
    assert isinstance(plan(spec, 2, first.topology), MeshPlan)
    resumed = plan(spec, 2, first.topology)
    assert isinstance(resumed, MeshPlan)
    assert resumed.topology.mesh.tp == 4, "without an entry in the matrix the saved tp stays"


def test_too_few_nodes_says_how_many_are_needed() -> None:
    found = plan(SEED, 1)
    assert isinstance(found, Refusal)
    assert found.reason == RefusalReason.TOO_FEW_NODES
    assert found.sentence == "1 node can be had, but at least 2 are needed; the nearest sizes that work: 2"


def test_the_largest_spec_is_planned_at_once_even_when_nothing_works() -> None:
    """A spec is the user's: no size of it may hold up the operator."""
    hopeless = MeshSpec(nodes=4096, ranks_per_node=8, global_batch=7, min_nodes=1, max_nodes=4096, tp=3)
    began = time.perf_counter()
    found = plan(hopeless, 4096)
    assert time.perf_counter() - began < 20  # 0.1 s on an idle core; hours if it searched
    assert isinstance(found, Refusal)
    assert found.sentence.endswith("no size works")


def test_the_sizes_of_a_spec_are_worked_out_once_however_often_a_job_is_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[int] = []
    best = mesh._best
    monkeypatch.setattr(
        mesh, "_best", lambda spec, size, *more: tried.append(size) or best(spec, size, *more)
    )
    wide = replace(SEED, min_nodes=1, max_nodes=512, nodes=509, alternatives=((4, 1), (2, 1), (1, 1)))
    found = workable_sizes(wide)
    assert len(tried) == 512
    assert workable_sizes(replace(wide)) == found
    assert len(tried) == 512
    saved = plan_size(replace(SEED, zero=1), 8)
    assert isinstance(saved, Topology)
    assert workable_sizes(wide, saved) == (), "what may be resumed is another question"
