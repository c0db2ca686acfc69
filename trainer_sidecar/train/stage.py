"""What a script says of its pipeline stage: its parameters' names in the whole model, and which ones are shared.

A checkpoint knows one model. The slice of a ModuleList is called `layers.0` on every stage (datapath T13), so either
the stage keeps the model's own names (a ModuleDict, or what `torch.distributed.pipelining.pipeline` makes), or it says
how they map.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from trainer_sidecar.contract.topology import Mesh


def refuse_unproven(mesh: Mesh) -> None:
    """Raises ValueError for a mesh with pipeline stages that no test holds: a checkpoint of it might not be whole."""
    if mesh.pp > 1 and mesh.tp > 1:
        what, instead = f"tp {mesh.tp} within pp {mesh.pp}", "use pipeline stages or tensor parallel layers"
    elif mesh.pp > 1 and mesh.dp > 1 and mesh.zero < 2:
        what, instead = f"ZeRO stage {mesh.zero} within pp {mesh.pp}", "shard each stage with FSDP2 (zero: 3)"
    else:
        return
    raise ValueError(
        f"mesh {mesh}: {what} is not supported, no test holds that it is saved and resumed right: {instead}; "
        "docs/combinations.md lists what is"
    )


@dataclass(frozen=True)
class Stage:
    """`names`: module prefixes of the stage to those of the whole model (`{"layers.0": "layers.2"}`, the longest one
    counts, "" is all), or a function of a name; `shared`: parameters that several stages train alike (tied embeddings
    whose gradients the script adds up), by their name in the whole model."""

    names: Mapping[str, str] | Callable[[str], str] | None = None
    shared: Sequence[str] = ()

    def name(self, own: str) -> str:
        """The name in the whole model."""
        if self.names is None:
            return own
        if callable(self.names):
            return self.names(own)
        fits = [prefix for prefix in self.names if prefix in ("", own) or own.startswith(f"{prefix}.")]
        if not fits:
            return own
        prefix = max(fits, key=len)
        rest = own[len(prefix) :].removeprefix(".")
        return ".".join(part for part in (self.names[prefix], rest) if part)
