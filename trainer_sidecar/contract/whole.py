"""One training state from what single ranks know of it: pipeline stages, and moments that one rank alone has (ZeRO-1).

The first rank of every stage says what its stage trains; the merge of a save and the comparison of a restore need the
whole, in the form that a run without stages would write. Raises ValueError with the name of what does not fit.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from trainer_sidecar.contract.checkpoint import TrainingState

_EQUAL = ("schedulers", "scaler", "data", "statistics", "accumulation")
"""Fields that all stages have alike."""
_MAPPINGS = ("$dict", "$ordered")
"""Tags of dicts whose values may be references to tensors (`extra_state`)."""


def whole_training_state(
    stages: Mapping[int, TrainingState], moments: Sequence[list[Any]] = ()
) -> TrainingState:
    """The state of all `stages`, each by the rank that speaks for it, with `moments`: as in a seal."""
    (first_rank, first), *others = sorted(stages.items())
    total = first
    for rank, state in others:
        who = f"rank {first_rank} and rank {rank}"
        for name in _EQUAL:
            if _text(getattr(total, name)) != _text(getattr(state, name)):
                raise ValueError(f"{name} differ between the pipeline stages of {who}: they must be equal")
        total = total.model_copy(
            update={
                "optimizers": _optimizers(total.optimizers, state.optimizers, who),
                "extra": _extra(total.extra, state.extra, "extra", who),
                "aliases": total.aliases + [names for names in state.aliases if names not in total.aliases],
                "gradient_buckets": total.gradient_buckets + state.gradient_buckets,
                "items": _union(total.items, state.items, "value", who),
                "paths": _union(total.paths, state.paths, "path of", who),
                "trainable": total.trainable + [n for n in state.trainable if n not in set(total.trainable)],
            }
        )
    optimizers = total.optimizers
    for known in moments:
        optimizers = [
            {**o, "state": _union(o["state"], more, f"optimizer {i} state of parameter", "two ranks")}
            for i, (o, more) in enumerate(zip(optimizers, known, strict=True))
        ]
    return total.model_copy(update={"optimizers": optimizers})


def _text(document: Any) -> str:
    """JSON, in which a NaN of the statistics equals another one."""
    return json.dumps(document, sort_keys=True)


def _optimizers(one: list[Any], two: list[Any], who: str) -> list[Any]:
    if len(one) != len(two):
        raise ValueError(f"{len(one)} and {len(two)} optimizers on the pipeline stages of {who}")
    return [_optimizer(i, a, b, who) for i, (a, b) in enumerate(zip(one, two, strict=True))]


def _optimizer(i: int, one: dict[str, Any], two: dict[str, Any], who: str) -> dict[str, Any]:
    for key in (one.keys() | two.keys()) - {"groups", "state"}:
        if one.get(key) != two.get(key):
            raise ValueError(
                f"{key} of optimizer {i} is {one.get(key)} and {two.get(key)} on the stages of {who}"
            )
    a, b = one["groups"], two["groups"]
    if len(a) != len(b):
        raise ValueError(
            f"optimizer {i} has {len(a)} and {len(b)} groups on the pipeline stages of {who}: groups are matched by "
            "their place, so give every stage as many (a group may be empty)"
        )
    groups = [
        _group(f"group {j} of optimizer {i}", g, h, who) for j, (g, h) in enumerate(zip(a, b, strict=True))
    ]
    state = _union(one["state"], two["state"], f"optimizer {i} state of parameter", who)
    return {**one, "groups": groups, "state": state}


def _group(what: str, one: dict[str, Any], two: dict[str, Any], who: str) -> dict[str, Any]:
    if one["fields"] != two["fields"]:
        fields = sorted(
            k
            for k in one["fields"].keys() | two["fields"].keys()
            if one["fields"].get(k) != two["fields"].get(k)
        )
        raise ValueError(f"{what} differs in {fields} between the pipeline stages of {who}")
    return {**one, "params": sorted(set(one["params"]) | set(two["params"]))}


def _union(one: dict[str, Any], two: dict[str, Any], what: str, who: str) -> dict[str, Any]:
    for name in one.keys() & two.keys():
        if one[name] != two[name]:
            raise ValueError(f"{what} {name} differs between {who}")
    return {**one, **two}


def _extra(one: Any, two: Any, path: str, who: str) -> Any:
    """Dicts are united; anything else that both stages have must be equal."""
    if one == two:
        return one
    a, b = _pairs(one), _pairs(two)
    if a is None or b is None:
        raise ValueError(f"{path} differs between the pipeline stages of {who}: name its parts by parameter")
    joined = dict(a)
    for key, value in b.items():
        joined[key] = _extra(joined[key], value, f"{path}/{key}", who) if key in joined else value
    tag = next((tag for tag in _MAPPINGS if tag in one), None)
    return joined if tag is None else {tag: [[key, value] for key, value in joined.items()]}


def _pairs(document: Any) -> dict[str, Any] | None:
    """The entries of a dict in its tagged form; the outermost one, objects by their name, is plain."""
    if not isinstance(document, dict):
        return None
    for tag in _MAPPINGS:
        if set(document) == {tag}:
            pairs = document[tag]
            return dict(pairs) if all(isinstance(key, str) for key, _ in pairs) else None
    return None if any(key.startswith("$") for key in document) else document
