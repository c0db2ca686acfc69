"""Merging parts: whole saves pass, every way of not being whole is refused by name, and the work stays near linear."""

import itertools
import random
import re
import sys
from math import prod
from types import FrameType
from typing import Any

import pytest
import store_world as world
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer_sidecar.contract.checkpoint import Part, Slices, Tensors, TrainingState
from trainer_sidecar.contract.journal import ObjectRef
from trainer_sidecar.contract.keys import save_id
from trainer_sidecar.contract.topology import Batch, Mesh, Topology
from trainer_sidecar.store.merge import MergeError, Merger, merge
from trainer_sidecar.store.overlap import find_overlap

SAVE = save_id("nonce", 1, 0, 0)
REF = ObjectRef(size=1, sha256="00")
Box = tuple[tuple[int, ...], tuple[int, ...], int]


def part(
    rank: int, world_size: int, tensors: dict[str, tuple[str, list[int]]], slices: list[Any], **changes: Any
) -> Part:
    """`slices`: (tensor name, start, size, bytes per element)."""
    topo = Topology(
        nodes=1,
        ranks_per_node=world_size,
        mesh=Mesh(dp=world_size),
        batch=Batch(global_batch_size=world_size, micro_batch_size=1, accumulation=1),
    )
    names = list(tensors)
    columns: dict[str, list[Any]] = {k: [] for k in ("tensor", "file", "offset", "length", "start", "size")}
    offset = 0
    for name, start, size, item in slices:
        length = prod(size) * item
        for key, value in zip(columns, (names.index(name), 0, offset, length, start, size), strict=True):
            columns[key].append(value)
        offset += length
    made = world.make_part(rank, epoch=1, save=SAVE, step=1, topo=topo, data=bytes(offset))
    return made.model_copy(
        update={
            "seal": made.seal.model_copy(
                update={
                    "tensors": Tensors(
                        names=names,
                        dtypes=[t[0] for t in tensors.values()],
                        shapes=[t[1] for t in tensors.values()],
                    ),
                    "slices": Slices(**columns),
                    **changes,
                }
            )
        }
    )


TWO = {"w": ("float32", [4, 6]), "b": ("bfloat16", [3])}


def halves() -> list[Part]:
    return [
        part(0, 2, TWO, [("w", [0, 0], [2, 6], 4), ("b", [0], [3], 2)]),
        part(1, 2, TWO, [("w", [2, 0], [2, 6], 4)]),
    ]


def refuse(parts: list[Part], match: str) -> None:
    with pytest.raises(MergeError, match=match):
        merge((p, REF) for p in parts)


def test_a_whole_save_becomes_an_index_that_does_not_depend_on_the_order_of_parts() -> None:
    a, b = halves()
    merged = merge([(a, REF), (b, REF)])
    assert merge([(b, REF), (a, REF)]) == merged
    assert merged.index.to_bytes() == merged.index_bytes
    assert merged.index.tensors.names == ["b", "w"]
    assert merged.index.files == ["rank-00000.distcp", "rank-00001.distcp"]
    assert merged.index.slices.tensor == [1, 0, 1]
    assert merged.index.slices.file == [0, 0, 1]
    assert merged.state_digest == f"{3:032x}"
    assert [s.rank for s in merged.shards] == [0, 1]


def test_digests_add_up_modulo_two_to_the_128() -> None:
    a, b = halves()
    a = a.model_copy(update={"seal": a.seal.model_copy(update={"state_digest": "f" * 32})})
    assert merge([(a, REF), (b, REF)]).state_digest == f"{1:032x}"


def test_a_missing_part_is_named() -> None:
    refuse(halves()[:1], "first of rank 1")
    refuse(halves()[1:], "first of rank 0")
    refuse([], "without a part")


def test_a_hole_is_named() -> None:
    a, _ = halves()
    refuse([a, part(1, 2, TWO, [("w", [2, 0], [1, 6], 4)])], "tensor w .* has 24 elements and 18")


def test_a_tensor_that_nobody_stored_is_named() -> None:
    a = part(0, 2, TWO, [("w", [0, 0], [2, 6], 4)])
    refuse([a, halves()[1]], "tensor b .* 0 were stored")


def test_an_overlap_is_named_even_when_the_volumes_add_up() -> None:
    a, _ = halves()
    refuse([a, part(1, 2, TWO, [("w", [1, 0], [2, 6], 4)])], "tensor w is stored twice: rank")
    refuse([a, part(1, 2, TWO, [("w", [2, 0], [2, 6], 4), ("b", [0], [1], 2)])], "tensor b is stored twice")


def test_a_slice_that_leaves_its_tensor_or_its_file_is_refused() -> None:
    a, _ = halves()
    refuse([a, part(1, 2, TWO, [("w", [3, 0], [2, 6], 4)])], "leaves")
    refuse([a, part(1, 2, TWO, [("w", [2], [2], 4)])], "leaves")
    refuse([a, part(1, 2, TWO, [("w", [2, 0], [2, 6], 2)])], "bytes")
    b = halves()[1]
    refuse(
        [a, b.model_copy(update={"shard": b.shard.model_copy(update={"size": 8})})], "of a file of 8 bytes"
    )


def test_slices_that_share_bytes_of_a_file_are_refused() -> None:
    a, b = halves()
    slices = a.seal.slices.model_copy(update={"offset": [0, 40]})
    refuse([a.model_copy(update={"seal": a.seal.model_copy(update={"slices": slices})}), b], "share bytes")


def test_ranks_that_disagree_on_a_tensor_are_named() -> None:
    a, _ = halves()
    refuse(
        [a, part(1, 2, {"w": ("float32", [4, 7])}, [("w", [2, 0], [2, 7], 4)])],
        r"on rank 1 and float32\[4, 6\] on rank 0",
    )
    refuse([a, part(1, 2, {"w": ("bfloat16", [4, 6])}, [("w", [2, 0], [2, 6], 2)])], "bfloat16")
    refuse([a, part(1, 2, {"w": ("quaternion", [4, 6])}, [])], "w")
    refuse([part(0, 2, {"q": ("quaternion", [1])}, [])], "unknown dtype quaternion")


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("model/ln", r"apart \(are gradients averaged\?"),
        ("extra object 'o' (belongs into per_rank=)", "apart$"),
        ("extra state of module 'a' (make it equal)", "apart$"),
        ("extra/ema/w", r"apart \(of an extra object; what differs by rank belongs into per_rank="),
        ("extra/module a/scale", r"apart \(a module's get_extra_state: make it equal"),
    ],
)
def test_replicas_that_drifted_apart_are_named_with_what_fits_them(name: str, advice: str) -> None:
    a = part(0, 2, TWO, [("w", [0, 0], [2, 6], 4), ("b", [0], [3], 2)], replica_digests={name: "aa"})
    refuse(
        [a, part(1, 2, TWO, [("w", [2, 0], [2, 6], 4)], replica_digests={name: "bb"})],
        f"replicas of {re.escape(name)} differ between ranks 0 and 1: .*{advice}",
    )


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("owner", [0, 1])
def test_what_one_rank_alone_has_is_named_and_not_a_tensor_that_is_written_twice_for_it(
    order: tuple[int, int], owner: int
) -> None:
    """Each rank plans by what it has: here both take `b`, or one takes `late` from a rank that does not know it."""
    common = {"model/b": "aa", "model/w (shard [0])": "cc"}
    mine = {"model/b": "aa", "model/w (shard [1])": "dd", "model/late": "bb"}
    stored = [("b", [0], [3], 2)] if owner == 0 else []
    parts = [
        part(0, 2, TWO, [("w", [0, 0], [2, 6], 4), ("b", [0], [3], 2)], replica_digests=common),
        part(1, 2, TWO, [("w", [2, 0], [2, 6], 4), *stored], replica_digests=mine),
    ]
    refuse([parts[i] for i in order], "rank 1 has model/late and rank 0 has not: make it on all ranks")
    parts[1].seal.replica_digests.pop("model/late")
    if owner == 0:
        refuse([parts[i] for i in order], "tensor b is stored twice")
    else:
        merge((parts[i], REF) for i in order)


def test_stages_need_not_have_the_same_tensors() -> None:
    digests = {rank: {f"model/layer.{rank // 2}": "aa"} for rank in range(4)}
    mesh = Mesh(dp=2, pp=2)
    topo = Topology(
        nodes=1,
        ranks_per_node=4,
        mesh=mesh,
        batch=Batch(global_batch_size=4, micro_batch_size=1, accumulation=2),
    )
    parts = [part(rank, 4, {}, [], replica_digests=digests[rank], topology=topo) for rank in range(4)]
    merger = Merger()
    for each in parts[:3]:
        merger.add(each, REF)
    digests[3]["model/late"] = "bb"
    with pytest.raises(MergeError, match="rank 3 has model/late and rank 2 has not"):
        merger.add(part(3, 4, {}, [], replica_digests=digests[3], topology=topo), REF)


def test_scalars_and_empty_tensors_are_covered() -> None:
    tensors = {"s": ("int64", []), "e": ("float32", [0, 4])}
    merge([(part(0, 1, tensors, [("s", [], [], 8)]), REF)])
    merge([(part(0, 1, tensors, [("s", [], [], 8), ("e", [0, 0], [0, 4], 4)]), REF)])
    refuse([part(0, 1, tensors, [])], "tensor s .* has 1 elements and 0")
    refuse([part(0, 1, tensors, [("s", [], [], 8), ("s", [], [], 8)])], "tensor s is stored twice")


@st.composite
def box_sets(draw: st.DrawFn) -> list[Box]:
    dims = draw(st.integers(1, 3))
    one = st.tuples(
        st.tuples(*[st.integers(0, 5)] * dims), st.tuples(*[st.integers(1, 4)] * dims), st.integers(0, 9)
    )
    return draw(st.lists(one, max_size=7))


@given(box_sets())
@settings(max_examples=400, deadline=None)
def test_the_sweep_finds_an_overlap_exactly_when_comparing_all_pairs_does(boxes: list[Box]) -> None:
    def clash(a: Box, b: Box) -> bool:
        return all(p < q + m and q < p + n for p, n, q, m in zip(a[0], a[1], b[0], b[1], strict=True))

    expected = any(clash(a, b) for a, b in itertools.combinations(boxes, 2))
    found = find_overlap(boxes)
    assert (found is not None) == expected
    assert found is None or clash(*found)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_any_grid_of_cuts_is_whole_and_loses_wholeness_with_any_piece(
    rows: int, columns: int, seed: int
) -> None:
    chance = random.Random(seed)
    cut = [sorted(chance.sample(range(1, 9), n - 1)) for n in (rows, columns)]
    edges = [[0, *c, 9] for c in cut]
    pieces = [
        ("w", [a, c], [b - a, d - c], 4)
        for a, b in itertools.pairwise(edges[0])
        for c, d in itertools.pairwise(edges[1])
    ]
    chance.shuffle(pieces)
    tensors = {"w": ("float32", [9, 9])}
    merge([(part(0, 1, tensors, pieces), REF)])
    pieces.pop()
    refuse([part(0, 1, tensors, pieces)], "tensor w")


def test_merging_grows_about_linearly_with_ranks() -> None:
    """Counted in executed lines, because seconds are the machine's."""

    def lines(ranks: int, tensors: int = 20) -> int:
        table = {f"layer.{i}": ("float32", [ranks * 4, 8]) for i in range(tensors)}
        parts = [
            (part(r, ranks, table, [(n, [4 * r, 0], [4, 8], 4) for n in table]), REF) for r in range(ranks)
        ]
        merger, count = Merger(), 0

        def tracer(frame: FrameType, event: str, argument: object) -> Any:
            nonlocal count
            count += event == "line"
            return tracer

        before = sys.gettrace()
        sys.settrace(tracer)
        try:
            for one in parts:
                merger.add(*one)
            merger.finish()
        finally:
            sys.settrace(before)
        return count

    small, large = lines(64), lines(256)
    assert large < small * 4 * 1.5, f"64 ranks took {small} lines, 256 took {large}"


def optimizer(names: list[str], state: list[str], lr: float = 0.1) -> dict[str, Any]:
    groups = [{"params": names, "fields": {"lr": lr}}]
    return {"class": "AdamW", "groups": groups, "state": {name: {"step": {"value": 1}} for name in state}}


def stages(second: TrainingState | None) -> list[Part]:
    """Two pipeline stages of one rank each."""
    mesh = Topology(
        nodes=1,
        ranks_per_node=2,
        mesh=Mesh(dp=1, pp=2),
        batch=Batch(global_batch_size=2, micro_batch_size=1, accumulation=2),
    )
    first = TrainingState(optimizers=[optimizer(["w"], ["w"])], trainable=["w"])
    return [
        part(0, 2, {"w": TWO["w"]}, [("w", [0, 0], [4, 6], 4)], topology=mesh, training_state=first),
        part(1, 2, {"b": TWO["b"]}, [("b", [0], [3], 2)], topology=mesh, training_state=second),
    ]


def test_the_training_state_of_all_stages_is_merged_into_that_of_one_model() -> None:
    second = TrainingState(optimizers=[optimizer(["b"], ["b"])], trainable=["b"])
    state = merge((p, REF) for p in stages(second)).first.training_state
    assert state == TrainingState(optimizers=[optimizer(["b", "w"], ["w", "b"])], trainable=["w", "b"])


@pytest.mark.parametrize(
    ("second", "match"),
    [
        (None, "part of rank 1 of save .* lacks the training state"),
        (
            TrainingState(optimizers=[optimizer(["b"], [], lr=0.2)]),
            r"group 0 of optimizer 0 differs in \['lr'\]",
        ),
        (TrainingState(optimizers=[]), "1 and 0 optimizers on the pipeline stages"),
        (TrainingState(optimizers=[optimizer(["b"], [])], scaler={"scale": 2}), "scaler differ between"),
    ],
    ids=["none", "learning rate", "number", "scaler"],
)
def test_stages_that_do_not_fit_together_are_refused_by_name(
    second: TrainingState | None, match: str
) -> None:
    refuse(stages(second), match)


def test_moments_that_one_rank_alone_has_are_added_and_two_that_differ_refused() -> None:
    one, two = halves()
    known = TrainingState(optimizers=[optimizer(["b", "w"], ["b"])])
    one = one.model_copy(update={"seal": one.seal.model_copy(update={"training_state": known})})

    def told(slots: dict[str, Any]) -> list[Part]:
        return [one, two.model_copy(update={"seal": two.seal.model_copy(update={"moments": [slots]})})]

    state = merge((p, REF) for p in told({"w": {"step": {"value": 1}}})).first.training_state
    assert state is not None
    assert state.optimizers == [optimizer(["b", "w"], ["b", "w"])]
    refuse(told({"b": {"step": {"value": 2}}}), "optimizer 0 state of parameter b differs between two ranks")
