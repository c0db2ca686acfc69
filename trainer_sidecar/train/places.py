"""Which ranks hold a tensor: all of them, those of one pipeline stage, or those of several stages.

A session's mesh has the axes (pp, dp, tp), pp outermost, so that the ranks of a stage are a contiguous block. A tensor
belongs to the stage of the rank that has it; names that several stages have are found when the session begins.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch.distributed.tensor import DTensor

from trainer_sidecar.train.layout import REPLICATE, Layout, Placement, layout


@dataclass
class Places:
    """The session's mesh as seen from `rank`. `shared`: stages of each name that more than one has."""

    world_size: int
    rank: int = 0
    axes: tuple[str, ...] = ()
    shape: tuple[int, ...] = ()
    shared: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def stages(self) -> int:
        """Number of pipeline stages."""
        return self.shape[0] if self.axes[:1] == ("pp",) else 1

    @property
    def per_stage(self) -> int:
        return self.world_size // self.stages

    @property
    def stage(self) -> int:
        """This rank's pipeline stage."""
        return self.rank // self.per_stage

    @property
    def speaks(self) -> bool:
        """Whether this rank is the first of its stage, which describes it."""
        return self.rank % self.per_stage == 0

    @property
    def stage_ranks(self) -> tuple[int, ...]:
        """Ranks of this stage, ascending."""
        return tuple(range(self.stage * self.per_stage, (self.stage + 1) * self.per_stage))

    def plain(self, name: str) -> Layout:
        """Of a tensor that each rank of its stages has in full."""
        return self._everywhere(name, (self.per_stage,), self.stage_ranks, (REPLICATE,))

    def alone(self, rank: int) -> Layout:
        """Of a tensor that one rank has."""
        return Layout((1,), (rank,), (REPLICATE,))

    def sharded(self, name: str, tensor: DTensor, placements: tuple[Placement, ...]) -> Layout:
        """Of a DTensor. Raises ValueError when its mesh does not tell which other ranks of the stage have it."""
        mesh = tensor.device_mesh
        ranks = tuple(int(r) for r in mesh.mesh.flatten().tolist())
        if len(ranks) == self.per_stage and set(ranks) == set(self.stage_ranks):
            return self._everywhere(name, tuple(mesh.mesh.shape), ranks, placements)
        axes = mesh.mesh_dim_names or ()
        inner = slice(1, None) if self.stages > 1 else slice(None)
        names = self.axes[inner]
        if not axes or not set(axes) <= set(names):
            raise ValueError(
                f"{name} lives on a mesh {axes} of {len(ranks)} of {self.world_size} ranks, which is no part of the "
                f"session's mesh {self.axes}{' within one stage' if self.stages > 1 else ''}: build the model on the "
                "mesh that the session gives"
            )
        known = dict(zip(axes, placements, strict=True))
        full = tuple(known.get(axis, REPLICATE) for axis in names)
        return self._everywhere(name, self.shape[inner], self.stage_ranks, full)

    def _everywhere(
        self, name: str, mesh: tuple[int, ...], ranks: tuple[int, ...], placements: tuple[Placement, ...]
    ) -> Layout:
        """The layout within this stage, repeated over the stages that share the name."""
        stages = self.shared.get(name)
        if stages is None:
            return layout(mesh, ranks, placements)
        step = self.per_stage
        all_ranks = tuple(r + (s - self.stage) * step for s in stages for r in ranks)
        return layout((len(stages), *mesh), all_ranks, (REPLICATE, *placements))
