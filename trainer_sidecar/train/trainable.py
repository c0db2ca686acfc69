"""Which parameters train, put back as they were at the save.

A script that freezes something at step 1,000 does not do so again after a resume at step 2,000: its moments would be
restored, and the parameter would train on (field: a parameter trained, then frozen).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from trainer_sidecar.contract.report import Check

_SHOWN = 10


def differences(inside_ddp: bool, saved: Sequence[str], now: Sequence[str]) -> list[str]:
    """Why the mask cannot be put back: DDP has taken its list of parameters when it was made."""
    changed = sorted(set(saved) ^ set(now))
    if not inside_ddp or not saved or not changed:
        return []
    return [
        f"trainable parameters: {changed[:_SHOWN]} train only in the checkpoint or only in this run, and DDP cannot "
        "change that later: set requires_grad before DistributedDataParallel(...)"
    ]


def restore(model: nn.Module, names: Mapping[int, str], saved: Sequence[str]) -> list[str]:
    """Set `requires_grad` as saved, by `names` (by id); returns those that were changed. An empty mask is none."""
    wanted, changed = set(saved), []
    for parameter in model.parameters() if wanted else ():
        name = names[id(parameter)]
        if parameter.requires_grad != (name in wanted):
            parameter.requires_grad_(name in wanted)
            changed.append(name)
    return changed


def check(saved: Sequence[str], now: Sequence[str], changed: Sequence[str]) -> Check:
    """The line of the resume report."""
    detail = f"put back as at the save: {list(changed)[:_SHOWN]}" if changed else ""
    same = not saved or sorted(saved) == sorted(now)
    return Check(name="trainable parameters", passed=same, expected=len(saved), found=len(now), detail=detail)
