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


class Begun:
    """What trained when the session began. Inside DDP no resume of the script can begin otherwise (`differences`)."""

    def __init__(self, model: nn.Module, names: Mapping[int, str], *, inside_ddp: bool) -> None:
        self._inside_ddp = inside_ddp
        self._names = sorted(names[id(p)] for p in model.parameters() if p.requires_grad)
        self._told: list[str] = []

    def changed(self, now: Sequence[str]) -> str:
        """A sentence for the first save of each other set; empty when there is nothing to say."""
        changed = sorted(set(self._names) ^ set(now))
        if not self._inside_ddp or changed == self._told:
            return ""
        self._told = changed
        if not changed:
            return ""
        more = f" and {len(changed) - _SHOWN} more" if len(changed) > _SHOWN else ""
        return (
            f"what trains was changed inside DistributedDataParallel: {', '.join(changed[:_SHOWN])}{more} "
            "(requires_grad is another one than when the session began). DDP took its list of parameters when it was "
            "made: gradients of those that came to it are not averaged over the ranks, and the script as it is cannot "
            "resume from what is saved from here on, since its next attempt begins with the other set. Let all that "
            "shall ever train do so from the beginning, at a learning rate of 0, or stop here and go on with a script "
            "that sets requires_grad so before DistributedDataParallel(...)"
        )


def check(saved: Sequence[str], now: Sequence[str], changed: Sequence[str]) -> Check:
    """The line of the resume report."""
    detail = f"put back as at the save: {list(changed)[:_SHOWN]}" if changed else ""
    same = not saved or sorted(saved) == sorted(now)
    return Check(name="trainable parameters", passed=same, expected=len(saved), found=len(now), detail=detail)
