"""Names of a state dict's values: where they stand in it, what DCP calls them, and under what they are stored.

DCP joins the keys on the way to a value by dots (`model.0.weight`), where it flattens. Stored names are joined by
slashes (`model/0.weight`), as a `Session`'s are, so that the model of either is found by `rtj export` and read by the
other's loader. Ways that a stored name does not tell (through lists, keys with slashes) are kept beside it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from os import PathLike
from typing import Any

from trainer_sidecar.contract.keys import parse_checkpoint_id

Path = tuple[str | int, ...]
"""Keys and list indexes from the outermost dict to the value."""

_BARE = re.compile(r"(\d+)(?:\.[A-Za-z]\w*)?")
_AFTER_STEP, _AFTER_A_WORD = (
    re.compile(rf"(?:{words})s?[-_=. ]*(\d+)(?![0-9A-Za-z])", re.IGNORECASE)
    for words in ("step", "iter|iteration|checkpoint|ckpt")
)
"""A number elsewhere is something else: of a model of 7 billion parameters, of an epoch."""


def path_of(fqn: str, mappings: Any) -> Path:
    """By the mappings of a planner that flattens; without them, the name itself is the only key."""
    return tuple(mappings.get(fqn, (fqn,))) if isinstance(mappings, Mapping) else (fqn,)


def stored_name(path: Path) -> str:
    """Under which a value is stored."""
    return "/".join(map(str, path))


def fqn_of(path: Path) -> str:
    """What DCP calls it."""
    return ".".join(map(str, path))


def untold(path: Path) -> list[str | int] | None:
    """The path, when its stored name does not tell it."""
    return None if told(stored_name(path)) == path else list(path)


def told(name: str) -> Path:
    """The path that a stored name tells."""
    return tuple(name.split("/"))


def step_of(checkpoint_id: str | PathLike[str] | int) -> int:
    """The step that a save's `checkpoint_id` names, in the last part of a path: a bare number, one after `step`, or
    after `iter`, `iteration`, `checkpoint`, `ckpt`; or a full id. Raises ValueError for one without such a number."""
    text = str(checkpoint_id).rstrip("/").rpartition("/")[2]
    try:
        return parse_checkpoint_id(text)[0]
    except ValueError:
        bare = _BARE.fullmatch(text)
    found = [bare[1]] if bare else _AFTER_STEP.findall(text) or _AFTER_A_WORD.findall(text)
    if not found:
        raise ValueError(
            f"checkpoint_id {str(checkpoint_id)!r} names no step: give the number of steps taken, as in "
            "checkpoint_id=f'step-{step}'"
        )
    return int(found[-1])


def names_a_step(checkpoint_id: str | PathLike[str]) -> bool:
    """Whether `step_of` has an answer: DCP asks before it begins."""
    try:
        return step_of(checkpoint_id) >= 0
    except ValueError:
        return False
