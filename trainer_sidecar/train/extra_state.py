"""State dicts of the session's `extra` objects: into tagged JSON with references to tensors, and back.

They come back as they were given: dicts and OrderedDicts as such, in their order. What would come back as something
else is refused by name when the session begins, and at each save (`tagged`).
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from trainer_sidecar.train import tagged

_MAPPINGS: dict[str, type[dict[Any, Any]]] = {"$dict": dict, "$ordered": collections.OrderedDict}
_TAGS = {kind: tag for tag, kind in _MAPPINGS.items()}
_ELSEWHERE = object()
"""A tensor that another pipeline stage has."""


def below(path: str, key: str) -> str:
    """Name of what `key` holds in the dict at `path`. A `/` in a key is no step down (escaped as in RFC 6901)."""
    return f"{path}/{key.replace('~', '~0').replace('/', '~1')}"


def flatten(value: Any, path: str, keep: Callable[[str, torch.Tensor], None]) -> Any:
    """Tagged JSON of a state dict; its tensors go to `keep` by name. Raises TypeError for what JSON cannot say."""
    if isinstance(value, torch.Tensor) and (isinstance(value, DTensor) or value.numel() > 1):
        keep(path, value)
        return {"$stored": path}
    kind = type(value)
    if kind in _TAGS and all(isinstance(key, str) for key in value):
        for key in value:
            tagged.refuse_enum(key, f"{path} key")
            tagged.refuse_half(key, f"{path} key")
        return {_TAGS[kind]: [[key, flatten(v, below(path, key), keep)] for key, v in value.items()]}
    if kind in (list, tuple):
        items = [flatten(v, f"{path}/{i}", keep) for i, v in enumerate(value)]
        return {"$tuple": items} if kind is tuple else items
    return tagged.encode(value, path)


def tensors_of(value: Any, path: str) -> list[tuple[str, torch.Tensor]]:
    """What `flatten` would keep."""
    found: list[tuple[str, torch.Tensor]] = []
    flatten(value, path, lambda name, tensor: found.append((name, tensor)))
    return found


def targets(document: Any, current: dict[str, torch.Tensor]) -> Any:
    """The saved state dict of an extra object, its tensors replaced by fresh ones like the `current` ones.

    Entries of dicts that belong to another pipeline stage are left out. Raises ValueError for those of a list.
    """
    found = _target(document, current)
    return {} if found is _ELSEWHERE else found


def _target(document: Any, current: dict[str, torch.Tensor]) -> Any:
    if isinstance(document, dict) and len(document) == 1:
        ((tag, body),) = document.items()
        if tag == "$stored":
            return torch.empty_like(current[body], requires_grad=False) if body in current else _ELSEWHERE
        if tag in _MAPPINGS:
            pairs = [(tagged.decode(key), _target(value, current)) for key, value in body]
            here = _MAPPINGS[tag]((key, value) for key, value in pairs if value is not _ELSEWHERE)
            return here if here or not pairs else _ELSEWHERE
        if tag == "$tuple":
            return _items(body, current, tuple)
    if isinstance(document, list):
        return _items(document, current, list)
    return tagged.decode(document)


def _items(body: list[Any], current: dict[str, torch.Tensor], kind: type) -> Any:
    items = [_target(item, current) for item in body]
    away = [item is _ELSEWHERE for item in items]
    if any(away) and not all(away):
        raise ValueError(
            "a list in the state of an extra object holds tensors of several pipeline stages: use a dict by parameter"
        )
    return _ELSEWHERE if any(away) else kind(items)


def collect(target: Any, path: str, into: dict[str, torch.Tensor]) -> None:
    """Local tensors of a `targets` result by the name under which they are stored."""
    if isinstance(target, torch.Tensor):
        into[path] = target._local_tensor if isinstance(target, DTensor) else target
    elif isinstance(target, dict):
        for key, value in target.items():
            collect(value, below(path, str(key)), into)
    elif isinstance(target, list | tuple):
        for i, value in enumerate(target):
            collect(value, f"{path}/{i}", into)
