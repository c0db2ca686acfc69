"""The state as the restore left it, until the first batch: what the script does in between goes unseen otherwise.

Generators that moved are put back (`rng`). Weights and moments that were written to cannot be: what trains on is not
the checkpoint's state, and the losses that follow would accuse the checkpoint. That is refused, unless somebody has
consented, or failed checks are only told by policy. There is no tolerance: what an optimizer's mode or a merge of
adapters does not bring back bit for bit is no bound on what a script may have done in between.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn

from trainer_sidecar.contract.plan import FingerprintClass, OnVerificationFailure, Plan
from trainer_sidecar.contract.report import Check
from trainer_sidecar.train import fingerprint_policy, rng, zero
from trainer_sidecar.train.capture import State, local_of
from trainer_sidecar.train.checksum import checksums
from trainer_sidecar.train.errors import ResumeRefused
from trainer_sidecar.train.witness import STATE_CHECK

log = logging.getLogger("rtj.train")
_SHOWN = 3
CONSENT = "state.changed"
"""What a pattern of `accept` must match."""


@dataclass(frozen=True)
class Tolerance:
    """What follows where the state is another one: the same on every rank."""

    accepted: bool = False
    warns: bool = False

    @staticmethod
    def of(plan: Plan, accept: Sequence[str]) -> Tolerance:
        rule = fingerprint_policy.ruled(CONSENT, plan.fingerprints.classes.items())
        given = any(fnmatchcase(CONSENT, pattern) for pattern in (*plan.fingerprints.accept, *accept))
        given = rule is FingerprintClass.HARMLESS or (given and rule is not FingerprintClass.REFUSED)
        return Tolerance(given, plan.verification.on_failure is OnVerificationFailure.WARN)


@dataclass
class Left:
    """Generators, parameters and moments of this rank right after a restore."""

    random: rng.Kept
    sums: dict[str, int]
    tolerance: Tolerance

    @staticmethod
    def now(state: State, device: torch.device, tolerance: Tolerance) -> Left:
        return Left(rng.Kept.now(device), _sums(state), tolerance)

    def check(self, state: State, *, fed: bool) -> list[Check]:
        """At the first batch, or at the first step's end where the script feeds itself (`fed` is False).

        Raises ResumeRefused when weights or moments are not those of the restore, and nobody tolerates it.
        """
        if not fed:
            detail = "not checked: the script feeds itself"
            return [self.random.unseen(), Check(name=STATE_CHECK, passed=True, detail=detail)]
        found = _sums(state)
        changed = [n for n in self.sums.keys() | found.keys() if found.get(n) != self.sums.get(n)]
        return [self.random.check(), self._state_check(sorted(changed), len(found))]

    def _state_check(self, changed: list[str], count: int) -> Check:
        names = ", ".join(changed[:_SHOWN])
        what = f"{len(changed)} of {len(self.sums)} tensors, {names} among them"
        if changed and not (self.tolerance.accepted or self.tolerance.warns):
            raise ResumeRefused(
                [
                    f"the state was changed after the session had restored it, {what}: load pretrained weights and "
                    "optimizer states before Session.from_env, or only where session.resume is None; evaluate, merge "
                    "adapters and change an optimizer's mode (eval() and train() of schedule-free ones) inside the "
                    "loop, after the first batch. Where those do not come back bit for bit and shall not matter, "
                    f"accept=[{CONSENT!r}] of the session, --accept of rtj run or verification.onFailure: Warn lets "
                    "them pass. The checkpoint is not at fault"
                ]
            )
        detail = f"{count} parameters and moments are as the restore left them"
        if changed:
            detail = (
                f"changed after the restore: {what}{', which is accepted' if self.tolerance.accepted else ''}"
            )
            log.warning("%s: %s", STATE_CHECK, detail)
        return Check(
            name=STATE_CHECK,
            passed=self.tolerance.accepted or not changed,
            found=f"{CONSENT} is accepted" if self.tolerance.accepted else None,
            detail=detail,
        )


def _sums(state: State) -> dict[str, int]:
    tensors = dict(_tensors(state))
    return dict(zip(tensors, checksums(list(tensors.values())), strict=True))


def _tensors(state: State) -> Iterator[tuple[str, torch.Tensor]]:
    """Local parts by name. Buffers are left out: a trial forward pass may move them."""
    state.reshard()
    for name, tensor in state.model_tensors():
        if isinstance(tensor, nn.Parameter):
            yield f"model/{name}", local_of(tensor)
    for i, optimizer in enumerate(state.optimizers):
        for parameter, slots in zero.state_of(optimizer).items():
            for key, value in slots.items():
                if isinstance(value, torch.Tensor):
                    yield f"optimizer/{i}/{state.names.get(id(parameter), '?')}/{key}", local_of(value)
