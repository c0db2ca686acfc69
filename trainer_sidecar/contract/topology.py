"""Mesh and batch: the shape of one attempt's computation, as everybody writes it down."""

from typing import Self

from pydantic import Field, model_validator

from trainer_sidecar.contract.base import Document


class Mesh(Document):
    """Device mesh. Axis order is (pp, dp, tp), tp innermost; world size = dp x tp x pp."""

    dp: int = Field(ge=1)
    tp: int = Field(default=1, ge=1)
    pp: int = Field(default=1, ge=1)
    zero: int = Field(default=3, ge=0, le=3)

    @property
    def world_size(self) -> int:
        return self.dp * self.tp * self.pp

    def __str__(self) -> str:
        return f"dp{self.dp}xtp{self.tp}xpp{self.pp}/zero{self.zero}"


class Batch(Document):
    """Constant global batch: global_batch_size = dp x micro_batch_size x accumulation, exactly (design 5)."""

    global_batch_size: int = Field(ge=1)
    micro_batch_size: int = Field(ge=1)
    accumulation: int = Field(ge=1)


class Topology(Document):
    """Where and how one attempt runs."""

    nodes: int = Field(ge=1)
    ranks_per_node: int = Field(ge=1)
    mesh: Mesh
    batch: Batch

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.nodes * self.ranks_per_node != self.mesh.world_size:
            raise ValueError(
                f"{self.nodes} nodes x {self.ranks_per_node} ranks is not the world size {self.mesh.world_size} "
                f"of {self.mesh}"
            )
        b = self.batch
        if self.mesh.dp * b.micro_batch_size * b.accumulation != b.global_batch_size:
            raise ValueError(
                f"dp {self.mesh.dp} x micro batch {b.micro_batch_size} x accumulation {b.accumulation} "
                f"is not the global batch {b.global_batch_size}"
            )
        return self
