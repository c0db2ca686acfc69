"""Does a checkpoint fit this run? Compared both ways before anything is touched; differences are named (fail closed).

What is missing, extra or changed is never skipped: torch's own loaders cast dtypes and ignore extra keys in silence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from trainer_sidecar.contract.checkpoint import Tensors, TrainingState

_SHOWN = 40


class Described(Protocol):
    """A tensor of this run."""

    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


class HasOptimizers(Protocol):
    """Documents of optimizers: of a checkpoint, or captured."""

    @property
    def optimizers(self) -> list[Any]: ...


def tensor_differences(
    saved: Tensors, entries: Mapping[str, Described], prefixes: tuple[str, ...]
) -> list[str]:
    """Missing, extra and changed tensors among the names that start with one of `prefixes`."""
    found = []
    stored = {
        name: (dtype, tuple(shape))
        for name, dtype, shape in zip(saved.names, saved.dtypes, saved.shapes, strict=True)
        if name.startswith(prefixes)
    }
    mine = {name: entry for name, entry in entries.items() if name.startswith(prefixes)}
    found += [f"missing in the checkpoint: {name}" for name in mine if name not in stored]
    found += [f"not in this run, but in the checkpoint: {name}" for name in stored if name not in mine]
    for name, entry in mine.items():
        if name not in stored:
            continue
        dtype, shape = stored[name]
        if shape != entry.shape:
            found.append(f"shape of {name}: {list(shape)} in the checkpoint, {list(entry.shape)} in this run")
        if dtype != entry.dtype:
            found.append(f"dtype of {name}: {dtype} in the checkpoint, {entry.dtype} in this run")
    return shorten(found)


def optimizer_differences(saved: HasOptimizers, now: HasOptimizers) -> list[str]:
    """Number, class, groups (by sorted parameter names) and group fields of the optimizers."""
    if len(saved.optimizers) != len(now.optimizers):
        return [
            f"number of optimizers: {len(saved.optimizers)} in the checkpoint, {len(now.optimizers)} in this run"
        ]
    found = []
    for i, (old, new) in enumerate(zip(saved.optimizers, now.optimizers, strict=True)):
        if old["class"] != new["class"]:
            found.append(
                f"class of optimizer {i}: {old['class']} in the checkpoint, {new['class']} in this run"
            )
        found += _group_differences(i, old["groups"], new["groups"])
    return shorten(found)


def _group_differences(i: int, old: list[Any], new: list[Any]) -> list[str]:
    if len(old) != len(new):
        return [
            f"groups of optimizer {i}: {len(old)} in the checkpoint, {len(new)} in this run: make the groups of the "
            "checkpoint (add_param_group) before Session.from_env, in every attempt, also those that it got later"
        ]
    stored = {tuple(g["params"]): g for g in old}
    found = []
    orders = [[tuple(g["params"]) for g in groups] for groups in (old, new)]
    if orders[0] != orders[1] and sorted(orders[0]) == sorted(orders[1]):
        places = [orders[0].index(key) for key in orders[1]]
        return [
            f"order of the groups of optimizer {i}: this run has those of the checkpoint in the order {places}; "
            "schedulers know groups by their place, so make them in the order of before"
        ]
    for number, group in enumerate(new):
        match = stored.get(tuple(group["params"]))
        if match is None:
            known = {name for g in old for name in g["params"]}
            extra = [n for n in group["params"] if n not in known][:3]
            what = f"such as {extra}" if extra else "but all of its parameters exist in other groups"
            found.append(
                f"group {number} of optimizer {i} holds parameters as no group of the checkpoint does, {what}"
            )
        elif match["fields"].keys() != group["fields"].keys():
            changed = sorted(match["fields"].keys() ^ group["fields"].keys())
            found.append(
                f"fields of group {number} of optimizer {i}: {changed} only in the checkpoint or only here"
            )
    return found


def presence_differences(
    saved: TrainingState, counts: Mapping[str, int], extra: Mapping[str, Any]
) -> list[str]:
    """Schedulers, scaler and extra objects that one side has and the other has not."""
    found = []
    for word, stored in (("schedulers", len(saved.schedulers)), ("scalers", int(saved.scaler is not None))):
        if stored != counts[word]:
            found.append(f"number of {word}: {stored} in the checkpoint, {counts[word]} in this run")
    stored_extra = saved.extra or {}
    found += [f"extra object {k!r} is not in the checkpoint" for k in extra if k not in stored_extra]
    found += [
        f"extra object {k!r} of the checkpoint is not in this run" for k in stored_extra if k not in extra
    ]
    return found


def mapping_differences(
    what: str, saved: Mapping[str, Any] | None, now: Mapping[str, Any] | None
) -> list[str]:
    """Differing entries of two flat mappings, such as fingerprints or the description of the sample order."""
    old, new = saved or {}, now or {}
    return [
        f"{what} {key}: {old.get(key, 'absent')} in the checkpoint, {new.get(key, 'absent')} in this run"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    ]


def order_differences(saved: Mapping[str, Any] | None, now: Mapping[str, Any] | None) -> list[str]:
    """Differing entries of what says which samples come when; of data that have grown or shrunk, what that means."""
    old, new = dict(saved or {}), dict(now or {})
    sizes = old.get("size"), new.get("size")
    if None in sizes or sizes[0] == sizes[1]:
        return mapping_differences("sample order", old, new)
    for order in (old, new):
        for key in ("size", "samplesPerEpoch"):
            order.pop(key, None)
    return [
        f"length of the data: {sizes[0]} samples in the checkpoint, {sizes[1]} in this run, where a place in the order "
        "means other samples: give the data of before; other data are a run of their own, which may begin with these "
        "weights (rtj export, rtj import)",
        *mapping_differences("sample order", old, new),
    ]


def shorten(found: list[str]) -> list[str]:
    """A message of 10,000 lines helps nobody."""
    rest = len(found) - _SHOWN
    return [*found[:_SHOWN], f"and {rest} more differences"] if rest > 0 else found
