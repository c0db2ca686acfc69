"""What a sidecar found wrong with a restore point, as the sentence that travels from rank to operator (protocol R24).

The only way out of a failed restore is the outcome's message (a termination message outlives the pod), so the evidence
is a sentence that people can read and that `parse_restore_fault` takes apart again. Only these two words may lead to a
quarantine; every other refusal (shapes, fingerprints, a store that is away) says nothing about the checkpoint.
"""

import re
from dataclasses import dataclass
from typing import Literal

from trainer_sidecar.contract.base import Document

CHECKSUM_MISMATCH = "ChecksumMismatch"
NOT_FOUND = "NotFound"
_FAULTS: dict[str, Literal["missing", "bytes"]] = {CHECKSUM_MISMATCH: "bytes", NOT_FOUND: "missing"}
_WORD = re.compile(rf"^(?:pod \S+: )?({CHECKSUM_MISMATCH}|{NOT_FOUND}): ")
_EVIDENCE = re.compile(r"(\S+): expected (.+?), found (.+?) \(read (\d+) times\)")


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
    fault: Literal["missing", "bytes"]
    reason: str
    file: str = ""
    """Name within the checkpoint; empty when the sentence names none."""
    expected: str = ""
    found: str = ""
    reads: int = 2


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
    reason = message[word.start(1) :].splitlines()[0][:1000]
    return RestoreFault.model_validate(
        {"checkpoint_id": checkpoint_id, "fault": _FAULTS[word[1]], "reason": reason, **known}
    )
