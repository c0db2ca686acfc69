"""The JSON of an index, put together from the columns of its parts, each turned into text when its part arrives.

A thousand ranks have a million slices. Making one document of them when the last part is in would take seconds on the
way of the commit; joining text that is there already does not.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trainer_sidecar.contract.checkpoint import Index, Slices, Tensors

_COLUMNS = tuple(Slices.model_fields)
NO_SLICES = Slices(tensor=[], file=[], offset=[], length=[], start=[], size=[])


@dataclass(frozen=True)
class SliceText:
    """Slices of one file: their number, and the columns that do not depend on other parts, as JSON without brackets."""

    count: int
    columns: dict[str, str]

    @staticmethod
    def of(slices: Slices) -> "SliceText":
        own = {name: _json(getattr(slices, name)) for name in ("offset", "length", "start", "size")}
        return SliceText(len(slices.tensor), own)


def index_bytes(
    files: Sequence[str], tensors: Tensors, pieces: Iterable[tuple[int, Sequence[int], SliceText]]
) -> bytes:
    """`Index.to_bytes` of `pieces`: number of a file, number of the tensor of each of its slices, their text."""
    found: dict[str, list[str]] = {name: [] for name in _COLUMNS}
    for file, numbers, text in pieces:
        if not text.count:
            continue
        found["tensor"].append(_json(numbers))
        found["file"].append(_json([file] * text.count))
        for name, column in text.columns.items():
            found[name].append(column)
    columns = ",".join(f'"{name}":[{",".join(found[name])}]' for name in _COLUMNS)
    head = Index(files=list(files), tensors=tensors, slices=NO_SLICES).to_json()
    empty = f"{NO_SLICES.to_json()}}}"
    assert head.endswith(empty), "the slices come last"
    return f"{head[: -len(empty)]}{{{columns}}}}}".encode()


def _json(values: Sequence[object]) -> str:
    return json.dumps(values, separators=(",", ":"))[1:-1]
