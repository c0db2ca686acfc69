"""Reasons in the status of a drill, declared once. What its sandbox waits for has the words of jobs (`conditions`)."""

from enum import StrEnum


class DrillReason(StrEnum):
    """Why a drill is in its phase, or ended so."""

    WAITING_FOR_TURN = "WaitingForTurn"
    STARTING = "Starting"
    MATCHED = "Matched"
    BYTES_PROVEN = "BytesProven"
    DIFFERS = "Differs"
    CHECKPOINT_BAD = "CheckpointBad"
    NOT_CONFIRMED = "NotConfirmed"
    NOTHING_COMPARED = "NothingCompared"
    NOTHING_TO_DRILL = "NothingToDrill"
    JOB_MISSING = "JobMissing"
    SPEC_INVALID = "SpecInvalid"
    NAME_TAKEN = "NameTaken"
    SANDBOX_GONE = "SandboxGone"
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    READER_FAILED = "ReaderFailed"
    FAULTS_REFUSED = "FaultsRefused"
    FAULTS_NOT_FIRED = "FaultsNotFired"


DRILL_REASON_DOCS: dict[DrillReason, str] = {
    DrillReason.WAITING_FOR_TURN: "Another drill of the same job has not ended; they run one after the other.",
    DrillReason.STARTING: "Its sandbox is being made.",
    DrillReason.MATCHED: "Passed: every check held, and the steps after the restore match the witness.",
    DrillReason.BYTES_PROVEN: "Passed: every byte was read and is what was saved (deep: false).",
    DrillReason.DIFFERS: "Failed: a check, or a step after the restore, differs from what was seen before.",
    DrillReason.CHECKPOINT_BAD: "Failed: the checkpoint is missing or damaged, read twice; it is under quarantine.",
    DrillReason.NOT_CONFIRMED: "Failed: a reader found wrong bytes, and the operator itself did not (deep: false).",
    DrillReason.NOTHING_COMPARED: "Failed: training had ended at this checkpoint, so no step could be compared.",
    DrillReason.NOTHING_TO_DRILL: "Failed: there is no such checkpoint that could be restored, or no longer.",
    DrillReason.JOB_MISSING: "Failed: the job that it names does not exist.",
    DrillReason.SPEC_INVALID: "Failed: no job can be made of the job's spec and the drill's; what to change.",
    DrillReason.NAME_TAKEN: "Failed: an object that is not this drill's has the name of its sandbox.",
    DrillReason.SANDBOX_GONE: "Failed: somebody deleted its sandbox before there was a result.",
    DrillReason.DEADLINE_EXCEEDED: "Failed: there was no result within deadlineSeconds; what it waited for.",
    DrillReason.FAULTS_REFUSED: "Failed: the faults in its spec may not happen here; which consent is missing.",
    DrillReason.FAULTS_NOT_FIRED: "Failed: it restored and matched, but not every fault in its spec has happened.",
    DrillReason.READER_FAILED: "Failed: the pod that reads the bytes ended without a result; what it said.",
}
