"""What a run is made of, as flat names and short values: `model.hidden_size: 4096`, `tokenizer.vocab.json: sha256:…`.

Flat, so that a difference is told by field and not as "the config changed". Of every part there is also one digest
under the part's own name (`model`, `tokenizer`, …), which a platform can declare in a job's spec. `fingerprint_policy`
says what a difference means.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from trainer_sidecar.contract.plan import FingerprintPolicy
from trainer_sidecar.train import fingerprint_content as content
from trainer_sidecar.train.agreement import Agreement
from trainer_sidecar.train.code_version import code_version
from trainer_sidecar.train.errors import ResumeRefused
from trainer_sidecar.train.fingerprint_policy import declared_differences

MAX_VALUE = 200
"""Characters; longer values are replaced by their digest."""
MAX_FIELDS = 2000
_VOLATILE = (
    "_name_or_path",
    "name_or_path",
    "transformers_version",
    "peft_version",
    "_commit_hash",
    "_attn_implementation_autoset",
)
"""Fields of Hugging Face configs that say where a config came from and not what it is."""


class Fingerprints(dict[str, str]):
    """Fingerprints of configurations whose classes gain fields with their releases. `defaults`: what fields are where
    a script says nothing; one that the checkpoint lacks, and has that value, changed nothing."""

    def __init__(self, found: Mapping[str, str], defaults: Mapping[str, str]) -> None:
        super().__init__(found)
        self.defaults = dict(defaults)


def defaults_of(found: Mapping[str, str] | None) -> dict[str, str]:
    """Those of `Fingerprints`; none of a plain mapping."""
    return found.defaults if isinstance(found, Fingerprints) else {}


def fingerprint(
    *,
    model_config: Any = None,
    tokenizer: Any = None,
    chat_template: Any = None,
    dataset: Any = None,
    training_config: Any = None,
    more: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Fingerprints to give to `Session.from_env(fingerprints=…)`; what is None is left out.

    `model_config`, `training_config`: a dict, a dataclass, argparse's Namespace, or an object with `to_dict()` (Hugging
    Face) or `model_dump()` (pydantic). `tokenizer`: a folder or file, or a tokenizer object. `chat_template`: text, a
    file, or the tokenizer object. `dataset`: a file, a folder, a list of files, a Hugging Face dataset, a map-style
    dataset, an iterable of bytes, or a `DatasetManifest`. `more`: your own names, equal in every attempt.
    Raises ValueError when a part cannot be read or two names collide.
    """
    parts: dict[str, Mapping[str, str]] = {}
    if model_config is not None:
        parts["model"] = config_fields(model_config, "model_config")
    if tokenizer is not None:
        parts["tokenizer"] = content.tokenizer_fields(tokenizer)
    if chat_template is not None:
        parts["chatTemplate"] = content.template_fields(chat_template)
    if dataset is not None:
        parts["datasetManifest"] = content.dataset_fields(dataset)
    if training_config is not None:
        parts["training"] = config_fields(training_config, "training_config")
    found: dict[str, str] = {}
    for name, fields in parts.items():
        found[name] = total(fields)
        found.update({f"{name}.{field}": value for field, value in fields.items()})
    taken = sorted(found.keys() & (more or {}).keys())
    if taken:
        raise ValueError(f"more={taken} are names of the library's own fingerprints: choose others")
    return {**found, **(more or {})}


def same_on_all(agreement: Agreement, rank: int, own: Mapping[str, str]) -> dict[str, str]:
    """Rank 0's fingerprints with its code version, on every rank, so that all decide alike.

    A rank that gives none takes rank 0's. Raises ValueError when a rank gives others: its pod has other data or code.
    """
    first = {**code_version(), **own} if rank == 0 else {}
    told: dict[str, str] = json.loads(agreement.share(json.dumps(first).encode()))
    different = [
        f"{n}: {v} here, {told.get(n, 'absent')} on rank 0" for n, v in own.items() if told.get(n) != v
    ]
    if different:
        raise ValueError(f"rank {rank} has other fingerprints than rank 0: {'; '.join(different[:10])}")
    return told


def with_declared(found: Mapping[str, str], policy: FingerprintPolicy) -> dict[str, str]:
    """`found` and what the plan declares. Raises ResumeRefused where the script finds something else."""
    differences = declared_differences(found, policy.declared)
    if differences:
        raise ResumeRefused(differences)
    return {**policy.declared, **found}


def config_fields(config: Any, what: str) -> dict[str, str]:
    """Leaves of a configuration by dotted path. Raises ValueError when it is no mapping of any kind known."""
    fields: dict[str, str] = {}
    _flatten(_mapping(config, what), "", fields)
    if len(fields) > MAX_FIELDS:
        raise ValueError(
            f"{what} has {len(fields)} fields, at most {MAX_FIELDS} are compared: give the part that matters"
        )
    return fields


def total(fields: Mapping[str, str]) -> str:
    """One digest of many fields, order-free."""
    return "sha256:" + hashlib.sha256(json.dumps(dict(fields), sort_keys=True).encode()).hexdigest()


def _mapping(config: Any, what: str) -> Mapping[str, Any]:
    if isinstance(config, Mapping):
        return config
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        found: dict[str, Any] = dataclasses.asdict(config)
        return found
    for method in ("to_dict", "model_dump"):
        if callable(getattr(config, method, None)):
            given: Any = getattr(config, method)()
            if isinstance(given, dict):
                return given
    if isinstance(config, argparse.Namespace | types.SimpleNamespace):
        return vars(config)
    raise ValueError(
        f"{what} is a {type(config).__name__}: give a dict, a dataclass, or an object with to_dict()"
    )


def _flatten(value: Mapping[Any, Any], prefix: str, into: dict[str, str]) -> None:
    for key, item in value.items():
        if str(key) in _VOLATILE:
            continue
        path = f"{prefix}{key}"
        if isinstance(item, Mapping) and item:
            _flatten(item, f"{path}.", into)
        else:
            into[path] = text(item)


def text(value: Any) -> str:
    """A value as it is shown; long ones by digest. Objects count by their class: their repr may hold an address."""
    shown = _shown(value)
    if len(shown) <= MAX_VALUE:
        return shown
    return "sha256:" + hashlib.sha256(shown.encode()).hexdigest()


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, Path):
        return str(value)
    if value is None or isinstance(value, bool | int | float):
        return json.dumps(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k}: {_shown(v)}" for k, v in sorted(value.items(), key=str)) + "}"
    if isinstance(value, set | frozenset):
        return _shown(sorted(map(_shown, value)))
    if isinstance(value, Iterable) and not hasattr(value, "shape"):
        return "[" + ", ".join(_shown(v) for v in value) + "]"
    if type(value).__module__ == "torch" and type(value).__name__ in ("dtype", "device"):
        return str(value)
    name = getattr(value, "name", None)  # an enum's member
    return f"{type(value).__name__}.{name}" if isinstance(name, str) else f"<{type(value).__name__}>"
