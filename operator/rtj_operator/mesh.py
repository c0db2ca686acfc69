"""The planner: which mesh and batch split the nodes at hand allow (design 5). Pure, and free of Kubernetes: `rtj run`
uses it.

A size is a number of nodes. At each size the first tp/pp of (first choice, alternatives in order) is taken that
divides the ranks, splits the global batch exactly, and that the compatibility matrix lets a checkpoint of the saved
mesh resume on. The plan is the largest size that works; a node that cannot be used stays idle and is named. Since
which sizes work does not depend on how many nodes there are, more nodes never give a smaller plan.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from rtj_operator.api.policies import CompatibilityStatus
from rtj_operator.api.spec import CompatibilityEntry, JobSpec, MeshPattern
from trainer_sidecar.contract.topology import Batch, Mesh, Topology


class RefusalReason(StrEnum):
    """Why there is no plan, one stable word."""

    BATCH_NOT_DIVISIBLE = "BatchNotDivisible"
    MESH_IMPOSSIBLE = "MeshImpossible"
    SIZE_NOT_ALLOWED = "SizeNotAllowed"
    TOO_FEW_NODES = "TooFewNodes"
    TRANSITION_NOT_LISTED = "TransitionNotListed"
    TRANSITION_BLOCKED = "TransitionBlocked"
    ZERO_STAGE_CHANGED = "ZeroStageChanged"


@dataclass(frozen=True)
class Refusal:
    """No plan: why, in a sentence with the values, and the sizes next to the one asked for that do work (ascending)."""

    reason: RefusalReason
    sentence: str
    nearest: tuple[int, ...] = ()


@dataclass(frozen=True)
class MeshPlan:
    """A plan, the nodes it leaves idle, and why the sizes between it and the nodes at hand do not work."""

    topology: Topology
    idle_nodes: int = 0
    note: str = ""
    """A sentence about the idle nodes; empty when there are none."""


@dataclass(frozen=True)
class MeshSpec:
    """What the planner needs of a spec."""

    nodes: int
    """Nodes wanted."""
    ranks_per_node: int
    global_batch: int
    min_nodes: int
    max_nodes: int
    sizes: tuple[int, ...] = ()
    """Sizes that may be used; empty: all from min_nodes to max_nodes."""
    tp: int = 1
    pp: int = 1
    zero: int = 3
    alternatives: tuple[tuple[int, int], ...] = ()
    """Other (tp, pp) in order of preference."""
    max_micro_batch: int | None = None
    """None: global_batch / dp at `nodes`."""

    @classmethod
    def of(cls, spec: JobSpec, ranks_per_node: int) -> "MeshSpec":
        """From a job's spec; ranks per node come from its template, so the caller has resolved them."""
        elastic, par = spec.elastic, spec.parallelism
        return cls(
            nodes=spec.nodes,
            ranks_per_node=ranks_per_node,
            global_batch=spec.batch.global_batch_size,
            min_nodes=elastic.min_nodes if elastic else spec.nodes,
            max_nodes=(elastic.max_nodes or spec.nodes) if elastic else spec.nodes,
            sizes=tuple(sorted(set(elastic.sizes or ()))) if elastic else (),
            tp=par.tp,
            pp=par.pp,
            zero=par.zero,
            alternatives=tuple((a.tp, a.pp) for a in par.alternatives or ()),
            max_micro_batch=spec.batch.max_micro_batch_size,
        )

    @property
    def allowed_sizes(self) -> tuple[int, ...]:
        """Sizes that may be used at all, ascending."""
        listed = self.sizes or range(self.min_nodes, self.max_nodes + 1)
        return tuple(n for n in listed if self.min_nodes <= n <= self.max_nodes)

    @property
    def micro_batch_limit(self) -> int:
        """Most samples that a rank takes at once."""
        if self.max_micro_batch is not None:
            return self.max_micro_batch
        dp = max(1, self.nodes * self.ranks_per_node // (self.tp * self.pp))
        return max(1, self.global_batch // dp)


def plan(
    spec: MeshSpec,
    nodes_available: int,
    saved: Topology | None = None,
    matrix: Sequence[CompatibilityEntry] = (),
) -> MeshPlan | Refusal:
    """The largest plan on at most `nodes_available` nodes (and at most `spec.max_nodes`).

    `saved` is the topology of the restore point; None: nothing to resume. Callers that want no more than the nodes
    asked for pass min(available, spec.nodes).
    """
    works = workable_sizes(spec, saved, matrix)
    usable = [n for n in works if n <= nodes_available]
    if not usable:
        return _no_size(spec, nodes_available, works, saved, matrix)
    size = usable[-1]
    topology = _best(spec, size, saved, matrix)
    assert isinstance(topology, Topology)
    idle = min(nodes_available, spec.max_nodes) - size
    return MeshPlan(topology, idle, _idle_note(spec, size, idle, works, saved, matrix) if idle else "")


def plan_size(
    spec: MeshSpec,
    size: int,
    saved: Topology | None = None,
    matrix: Sequence[CompatibilityEntry] = (),
) -> Topology | Refusal:
    """The plan on exactly `size` nodes, or why there is none, with the sizes next to it that work."""
    return _plan_size(spec, size, workable_sizes(spec, saved, matrix), saved, matrix)


def _plan_size(
    spec: MeshSpec,
    size: int,
    works: Sequence[int],
    saved: Topology | None,
    matrix: Sequence[CompatibilityEntry],
) -> Topology | Refusal:
    """`plan_size`, given all sizes that work."""
    nearest = _nearest(works, size)
    if size not in spec.allowed_sizes:
        allowed = f"one of {_list(spec.sizes)}" if spec.sizes else f"{spec.min_nodes} to {spec.max_nodes}"
        sentence = f"{_nodes(size)} is not a size that may be used: elastic allows {allowed}"
        return Refusal(RefusalReason.SIZE_NOT_ALLOWED, sentence, nearest)
    found = _best(spec, size, saved, matrix)
    if isinstance(found, Topology):
        return found
    return Refusal(found.reason, f"{found.sentence}; {_nearest_words(nearest)}", nearest)


def _best(
    spec: MeshSpec, size: int, saved: Topology | None, matrix: Sequence[CompatibilityEntry]
) -> Topology | Refusal:
    """The first tp/pp that works at this size; the first choice's refusal speaks for all."""
    found = _arrange(spec, size, spec.tp, spec.pp, saved, matrix)
    if isinstance(found, Topology):
        return found
    others = (_arrange(spec, size, tp, pp, saved, matrix) for tp, pp in spec.alternatives)
    return next((other for other in others if isinstance(other, Topology)), found)


def transition(saved: Mesh, wanted: Mesh, matrix: Sequence[CompatibilityEntry] = ()) -> Refusal | None:
    """None when a checkpoint of mesh `saved` may be resumed on mesh `wanted`, else why not (requirements 5).

    Fail closed: another ZeRO stage never; another tp or pp only by a verified entry; dp alone unless an entry blocks
    it. The first entry that matches decides.
    """
    if saved == wanted:
        return None
    change = f"resuming a checkpoint of {saved} on {wanted}"
    if saved.zero != wanted.zero:
        sentence = (
            f"{change} changes the ZeRO stage from {saved.zero} to {wanted.zero}, which changes the meaning of the "
            f"optimizer state: set parallelism.zero back to {saved.zero} (rtj run: --zero {saved.zero}), or begin a "
            "run of its own (checkpoint.runId, --run-id)"
        )
        return Refusal(RefusalReason.ZERO_STAGE_CHANGED, sentence)
    entry = next(
        (e for e in matrix if _matches(e.from_, saved, wanted.zero) and _matches(e.to, wanted, wanted.zero)),
        None,
    )
    if entry is not None and entry.status == CompatibilityStatus.BLOCKED:
        sentence = (
            f"{change} is {entry.status} by resumeCompatibility: run a drill of it, or list it as verified"
        )
        return Refusal(RefusalReason.TRANSITION_BLOCKED, sentence)
    if entry is None and (saved.tp, saved.pp) != (wanted.tp, wanted.pp):
        sentence = f"{change} changes tp or pp: add it to resumeCompatibility once it is verified"
        return Refusal(RefusalReason.TRANSITION_NOT_LISTED, sentence)
    return None


def with_proven(
    matrix: Sequence[CompatibilityEntry], proven: Iterable[tuple[Mesh, Mesh]]
) -> tuple[CompatibilityEntry, ...]:
    """The matrix in which transitions (saved, wanted) that drills have proven are open where an entry blocks them.

    What no entry allows stays refused: a drill proves one pair of meshes, not that somebody wants it.
    """
    opened = [
        CompatibilityEntry(from_=_exactly(saved), to=_exactly(wanted), status=CompatibilityStatus.VERIFIED)
        for saved, wanted in proven
        if (refused := transition(saved, wanted, matrix)) is not None
        and refused.reason is RefusalReason.TRANSITION_BLOCKED
    ]
    return (*opened, *matrix)


def _exactly(mesh: Mesh) -> MeshPattern:
    return MeshPattern(dp=mesh.dp, tp=mesh.tp, pp=mesh.pp, zero=mesh.zero)


def _matches(pattern: MeshPattern, mesh: Mesh, zero: int) -> bool:
    axes = ((pattern.dp, mesh.dp), (pattern.tp, mesh.tp), (pattern.pp, mesh.pp))
    wanted_zero = zero if pattern.zero is None else pattern.zero
    return wanted_zero == mesh.zero and all(p in ("*", value) for p, value in axes)


def _arrange(
    spec: MeshSpec, size: int, tp: int, pp: int, saved: Topology | None, matrix: Sequence[CompatibilityEntry]
) -> Topology | Refusal:
    ranks = size * spec.ranks_per_node
    where = f"{_nodes(size)} x {spec.ranks_per_node} ranks = {ranks} ranks"
    if ranks % (tp * pp):
        sentence = f"{where} cannot be divided by tp {tp} x pp {pp} = {tp * pp}"
        return Refusal(RefusalReason.MESH_IMPOSSIBLE, sentence)
    dp = ranks // (tp * pp)
    if spec.global_batch % dp:
        sentence = f"{where} gives dp {dp}, which does not divide batch.globalBatchSize {spec.global_batch}"
        return Refusal(RefusalReason.BATCH_NOT_DIVISIBLE, sentence)
    mesh = Mesh(dp=dp, tp=tp, pp=pp, zero=spec.zero)
    refused = transition(saved.mesh, mesh, matrix) if saved is not None else None
    if refused is not None:
        return refused
    return Topology(nodes=size, ranks_per_node=spec.ranks_per_node, mesh=mesh, batch=split_batch(spec, dp))


def split_batch(spec: MeshSpec, dp: int) -> Batch:
    """Global batch = dp x micro batch x accumulation, exactly, with the largest micro batch within the limit."""
    per_rank = spec.global_batch // dp
    micro = largest_divisor(per_rank, spec.micro_batch_limit)
    return Batch(global_batch_size=spec.global_batch, micro_batch_size=micro, accumulation=per_rank // micro)


def largest_divisor(number: int, limit: int) -> int:
    """Largest divisor of `number` that is at most `limit` (both >= 1). O(sqrt(number))."""
    if number <= limit:
        return number
    best, small = 1, 1
    while small * small <= number:
        if number % small == 0:
            best = max(best, *(d for d in (small, number // small) if d <= limit), 1)
        small += 1
    return best


def workable_sizes(
    spec: MeshSpec, saved: Topology | None = None, matrix: Sequence[CompatibilityEntry] = ()
) -> tuple[int, ...]:
    """All sizes with a plan, ascending."""
    if saved is None and not matrix:
        return _sizes_from_scratch(spec)
    return tuple(n for n in spec.allowed_sizes if isinstance(_best(spec, n, saved, matrix), Topology))


@lru_cache(512)  # the operator asks at every look at a job, and thousands of sizes take a tenth of a second
def _sizes_from_scratch(spec: MeshSpec) -> tuple[int, ...]:
    return tuple(n for n in spec.allowed_sizes if isinstance(_best(spec, n, None, ()), Topology))


def plan_table(
    spec: MeshSpec, saved: Topology | None = None, matrix: Sequence[CompatibilityEntry] = ()
) -> list[tuple[int, Topology | Refusal]]:
    """(size, plan or refusal) for every size from min_nodes to max_nodes: what `rtj plan` prints."""
    works = workable_sizes(spec, saved, matrix)
    sizes = range(spec.min_nodes, spec.max_nodes + 1)
    return [(n, _plan_size(spec, n, works, saved, matrix)) for n in sizes]


def _nearest(works: Sequence[int], size: int) -> tuple[int, ...]:
    below, above = [n for n in works if n < size], [n for n in works if n > size]
    return (*below[-1:], *above[:1])


def _no_size(
    spec: MeshSpec,
    available: int,
    works: Sequence[int],
    saved: Topology | None,
    matrix: Sequence[CompatibilityEntry],
) -> Refusal:
    """No size up to `available` works: the largest one's reason speaks for all."""
    allowed = [n for n in spec.allowed_sizes if n <= available]
    if allowed:
        found = _plan_size(spec, allowed[-1], works, saved, matrix)
        assert isinstance(found, Refusal)
        return found
    nearest, needed = _nearest(works, available), min(spec.allowed_sizes, default=spec.min_nodes)
    sentence = f"{_nodes(available)} can be had, but at least {needed} are needed; {_nearest_words(nearest)}"
    return Refusal(RefusalReason.TOO_FEW_NODES, sentence, nearest)


def _idle_note(
    spec: MeshSpec,
    size: int,
    idle: int,
    works: Sequence[int],
    saved: Topology | None,
    matrix: Sequence[CompatibilityEntry],
) -> str:
    """Which nodes stay idle, and why the largest size that would use more of them does not work."""
    wanted = _plan_size(spec, size + idle, works, saved, matrix)
    why = f": {wanted.sentence}" if isinstance(wanted, Refusal) else ""
    return f"{_nodes(size)} used, {_nodes(idle)} idle{why}"


def _nearest_words(nearest: Sequence[int]) -> str:
    return f"the nearest sizes that work: {_list(nearest)}" if nearest else "no size works"


def _nodes(count: int) -> str:
    return f"{count} node{'' if count == 1 else 's'}"


def _list(values: Sequence[int]) -> str:
    return ", ".join(str(v) for v in values)
