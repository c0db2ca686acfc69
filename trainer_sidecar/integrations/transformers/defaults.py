"""What arguments and adapters' settings are where a script says nothing: an upgrade adds fields, and one that is left
as it comes is no change of the run."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

from trainer_sidecar.train import fingerprint


def defaults_of(args: Any, adapters: Mapping[str, Any]) -> dict[str, str]:
    """Fingerprints of the classes' defaults by name. `args`: TrainingArguments; `adapters`: peft's configs by name."""
    peft = {name: _fields(config) for name, config in adapters.items()}
    return fingerprint(training_config={**_fields(args), "peft": peft})


def _fields(config: Any) -> dict[str, Any]:
    """Of a dataclass, those of the dataclasses in it as well. One that says None and becomes False by itself is False;
    fields that have no default are left out."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        now, default = getattr(config, field.name, None), _default(field)
        if dataclasses.is_dataclass(now):
            found[field.name] = _fields(now)
        elif default is None and now is False:
            found[field.name] = False
        elif default is not dataclasses.MISSING:
            found[field.name] = default.value if isinstance(default, enum.Enum) else default
    return found


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default
