"""A rank's documents, all that a save holds beside tensors, have a limit: the sidecar reads a seal whole.

It is held here, before anything is sealed: a seal that the sidecar cannot read would keep its buffer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from trainer_sidecar.contract.checkpoint import Seal
from trainer_sidecar.contract.volume import MAX_SEAL_BYTES
from trainer_sidecar.train.errors import StagingFailed

_NAMED = ("extra", "items")
"""Of the training state: by name, one for each object of the script."""


def seal_bytes(seal: Seal, limit: int = MAX_SEAL_BYTES) -> bytes:
    """The seal as it is written. Raises StagingFailed above `limit` bytes, naming the largest entry."""
    data = seal.to_bytes()
    if len(data) <= limit:
        return data
    name, size = max(
        ((name, len(json.dumps(value, separators=(",", ":")))) for name, value in _entries(seal)),
        key=lambda e: e[1],
    )
    raise StagingFailed(
        f"rank {seal.rank} has {len(data)} bytes of documents beside its tensors, a save takes {limit} of a rank: the "
        f"largest is {name} with {size} bytes of JSON. Let its state_dict() give less, or what is large as tensors, "
        "which go into shards"
    )


def _entries(seal: Seal) -> Iterator[tuple[str, Any]]:
    """Everything in a seal that can be large, under the name by which the script gave it."""
    document = json.loads(seal.to_bytes())
    state = document.pop("trainingState", None) or {}
    rank_state = document.pop("rankState", None)
    for name, value in state.items():
        yield from _named(name, value) if name in _NAMED else [(name, value)]
    if isinstance(rank_state, dict):
        yield from _named("per_rank", rank_state.pop("objects", {}))
    yield "this rank's random generators and open window", rank_state
    names = {"tensors": "the list of tensors", "slices": "the list of slices"}
    yield from ((names.get(name, name), value) for name, value in document.items())


def _named(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict):
        yield name, value
        return
    yield from ((f"{name}.{key}", part) for key, part in value.items())
