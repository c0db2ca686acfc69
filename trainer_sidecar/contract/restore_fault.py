"""What a sidecar found wrong with a restore point, as the sentence that travels from rank to operator (protocol R24).

The only way out of a failed restore is the outcome's message (a termination message outlives the pod), so the evidence
is a sentence that people can read and that `parse_restore_fault` takes apart again. Only these words may lead to a
quarantine, `StateMismatch` only against a witness; every other refusal (shapes, fingerprints, a store that is away)
says nothing about the checkpoint. Which kind a refusal is, `kind_of_refusal` says to the operator and to `rtj run`.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from trainer_sidecar.contract.base import Document

CHECKSUM_MISMATCH = "ChecksumMismatch"
NOT_FOUND = "NotFound"
STATE_MISMATCH = "StateMismatch"
Fault = Literal["missing", "bytes", "state"]
_FAULTS: dict[str, Fault] = {CHECKSUM_MISMATCH: "bytes", NOT_FOUND: "missing", STATE_MISMATCH: "state"}
_WORD = re.compile(rf"^(?:pod \S+: )?({CHECKSUM_MISMATCH}|{NOT_FOUND}|{STATE_MISMATCH}): ")
_FIRST_WORD = re.compile(r"^(?:pod \S+: )?([A-Z]\w+): ")
_PASSING = frozenset({"Internal", "WrongEpoch", "BadRequest"})
_LOSS = re.compile(r"loss of step (\d{1,15}): expected (\S{1,64}), found (\S{1,64}) ")
_EVIDENCE = re.compile(r"(\S+): expected (.+?), found (.+?) \(read (\d+) times\)")


class Refusal(StrEnum):
    """What a refused resume says. The words are those of the operator's outcomes."""

    POINT_BAD = "RestorePointBad"
    """Bytes are missing or wrong, or training went on otherwise: the next fence looks for itself."""
    STORE_AWAY = "StoreUnavailable"
    """The restore point could not be read because the store was away: no fault of anybody's."""
    PASSING = "Failed"
    """The sidecar could not serve the restore just then: an ordinary failure, like any other of a rank."""
    UNFIT = "ResumeRefused"
    """The checkpoint does not fit the script: the next attempt would meet the same."""


@dataclass(frozen=True)
class Evidence:
    """One object that is not what it must be, and how often it was read."""

    key: str
    expected: str
    found: str
    reads: int

    def __str__(self) -> str:
        return f"{self.key}: expected {self.expected}, found {self.found} (read {self.reads} times)"


class RestoreFault(Document):
    """An accusation against a checkpoint. Whether it is believed, the journal's readers decide."""

    checkpoint_id: str
    fault: Fault
    reason: str
    file: str = ""
    """Name within the checkpoint; empty when the sentence names none."""
    expected: str = ""
    found: str = ""
    reads: int = 2
    step: int = 0
    """Of a state fault: the step whose loss differed; `expected` and `found` are losses."""


def state_mismatch(step: int, expected: float, found: float, detail: str) -> str:
    """The sentence of a state fault, as `parse_restore_fault` takes it apart."""
    return f"{STATE_MISMATCH}: loss of step {step}: expected {expected!r}, found {found!r} ({detail})"


def trains_otherwise(checkpoint_ids: Sequence[str]) -> str:
    """What to do when one restore point after the other trains otherwise than its witness: only a person may take a
    quarantine back (R24), and must be told how for each of `checkpoint_ids`."""
    commands = "; ".join(f"rtj checkpoints reinstate {i} --by NAME --reason TEXT" for i in checkpoint_ids)
    back = (
        f". Take the quarantines back where the checkpoints are not to blame: {commands}" if commands else ""
    )
    return (
        "likelier than that many bad checkpoints, the script, its data or the hardware has changed or is not "
        f"reproducible: see docs/resumes.md{back}. To go on without this check set verification.onFailure: Warn "
        "(rtj run --on-verification-failure Warn)"
    )


def kind_of_refusal(message: str) -> Refusal:
    """Which kind of refusal the message of a `ResumeRefused` outcome tells, by its first word."""
    if parse_restore_fault(message, ""):
        return Refusal.POINT_BAD
    word = _FIRST_WORD.match(message)
    if word is None:
        return Refusal.UNFIT
    if word[1] == Refusal.STORE_AWAY.value:
        return Refusal.STORE_AWAY
    return Refusal.PASSING if word[1] in _PASSING else Refusal.UNFIT


def parse_restore_fault(message: str, checkpoint_id: str) -> RestoreFault | None:
    """The accusation in an outcome's message against the attempt's restore point; None for any other refusal."""
    word = _WORD.match(message)
    if word is None:
        return None
    evidence = _EVIDENCE.search(message, word.end())
    known: dict[str, object] = {}
    if evidence is not None:
        key, expected, found, reads = evidence.groups()
        known = {
            "file": key.rpartition(f"/{checkpoint_id}/")[2],
            "expected": expected,
            "found": found,
            "reads": int(reads),
        }
    loss = _LOSS.match(message, word.end())
    if word[1] == STATE_MISMATCH:
        if loss is None:
            return None
        known = {
            "step": int(loss[1]),
            "expected": loss[2],
            "found": loss[3],
            "file": "witness.json",
            "reads": 1,
        }
    reason = message[word.start(1) :].splitlines()[0][:1000]
    return RestoreFault.model_validate(
        {"checkpoint_id": checkpoint_id, "fault": _FAULTS[word[1]], "reason": reason, **known}
    )
