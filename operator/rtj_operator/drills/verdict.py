"""What a drill's sandbox has come to, as a status. Pure: the sandbox's own status in, the drill's out.

The status always says what is meant before it is done, and the result before it is recorded, so that an operator that
dies in between goes on where it was.
"""

from collections import Counter
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from rtj_operator.api import JobStatus, Phase, ResumableTrainingJob
from rtj_operator.api.drill import DrilledCheckpoint, DrillPhase, DrillStatus, ResumeDrill, Sandbox
from rtj_operator.drills.reading import Reading
from rtj_operator.drills.sandbox import sandbox_name, sandbox_run
from rtj_operator.drills.words import DrillReason
from rtj_operator.faultgate import fired_by_operator
from rtj_operator.text import count, lasting, many, printable
from trainer_sidecar.contract.fault_order import OPERATOR_POINTS

FAULTS_LATE_SECONDS = 20.0
"""From the restore that matches until every fault must have been told."""
_MOST = 2000
_WAITS = ". It is not done yet: "
_DAY = 86400.0


@dataclass(frozen=True)
class Recorded:
    """What came of recording a result."""

    entry: int | None = None
    """Sequence of its entry in the run's journal; None: there is nothing to be said there."""
    quarantined: str = ""
    """Why the checkpoint is under quarantine now."""
    dropped: str = ""
    """Why it cannot be restored any more, without having been found bad."""
    mesh_from: str = ""
    """Mesh that saved, in one word."""


@dataclass(frozen=True)
class Ending:
    """How a drill ends."""

    passed: bool
    reason: str
    message: str


def begun(drill: ResumeDrill, point: DrilledCheckpoint, now: float) -> DrillStatus:
    """The status of a drill whose turn has come: what is drilled, and where. Its sandbox comes after it."""
    where = Sandbox(name=sandbox_name(drill), run_id=sandbox_run(drill) if drill.spec.deep else "")
    what = f"restoring step {point.step}" if drill.spec.deep else f"reading all bytes of step {point.step}"
    status = told(drill, drill.status, DrillPhase.RUNNING, DrillReason.STARTING, f"{what} in {where.name}")
    return status.model_copy(
        update={"checkpoint": point, "sandbox": where, "started_at": drill.status.started_at or _at(now)}
    )


def told(
    drill: ResumeDrill, status: DrillStatus, phase: DrillPhase, reason: str, message: str
) -> DrillStatus:
    """The status with a phase, in a word and a sentence."""
    return status.model_copy(
        update={
            "observed_generation": drill.metadata.generation,
            "phase": phase,
            "reason": reason,
            "message": printable(message)[:_MOST],
        }
    )


def ending(drill: ResumeDrill, status: DrillStatus, end: Ending) -> DrillStatus:
    """The status once the result is known and not yet recorded."""
    result = DrillPhase.PASSED if end.passed else DrillPhase.FAILED
    status = told(drill, status, DrillPhase.RECORDING, end.reason, end.message)
    return status.model_copy(update={"result": result})


def recorded(drill: ResumeDrill, status: DrillStatus, found: Recorded) -> DrillStatus:
    """The status with what came of recording the result. A damaged checkpoint is the reason, whatever
    ended the sandbox."""
    update: dict[str, object] = {"journal_entry": found.entry}
    if found.mesh_from:
        update["mesh_from"] = found.mesh_from
    if found.quarantined:
        update["quarantined"] = True
        status = told(drill, status, DrillPhase.RECORDING, DrillReason.CHECKPOINT_BAD, found.quarantined)
    elif found.dropped and status.result is DrillPhase.FAILED:
        status = told(drill, status, DrillPhase.RECORDING, DrillReason.NOTHING_TO_DRILL, found.dropped)
    elif found.dropped:
        text = f". The journal has no word of it: {found.dropped}"
        text = f"{_verdict(status).removesuffix(text)}{text}"
        status = told(drill, status, DrillPhase.RECORDING, status.reason or "", text)
    return status.model_copy(update=update)


def unrecorded(status: DrillStatus, trouble: str) -> DrillStatus:
    """The status of a drill whose result is known, and behind it what still keeps the drill from its end."""
    text = f"{_verdict(status)}{_WAITS}{printable(trouble)[: _MOST // 2]}"
    return status.model_copy(update={"message": text})


def _verdict(status: DrillStatus) -> str:
    """What was said of the result itself."""
    return (status.message or "").partition(_WAITS)[0]


def ended(drill: ResumeDrill, status: DrillStatus, now: float) -> DrillStatus:
    """The last status: everything is recorded, and the sandbox goes."""
    assert status.result is not None, "a drill ends with a result"
    return status.model_copy(
        update={
            "observed_generation": drill.metadata.generation,
            "phase": status.result,
            "message": _verdict(status),
            "ended_at": _at(now),
        }
    )


def overdue(drill: ResumeDrill, status: DrillStatus, now: float) -> Ending | None:
    """The end of a drill that takes too long, with what it waited for."""
    if seconds_left(drill, status, now) > 0:
        return None
    limit = lasting(drill.spec.deadline_seconds)
    return Ending(
        False,
        DrillReason.DEADLINE_EXCEEDED,
        f"no result within deadlineSeconds ({limit}); it was at {status.reason}: {status.message}. That says nothing "
        "about the checkpoint: give the drill nodes or time",
    )


def seconds_left(drill: ResumeDrill, status: DrillStatus, now: float) -> float:
    """Until the deadline."""
    began = status.started_at.timestamp() if status.started_at is not None else now
    return began + drill.spec.deadline_seconds - now


def watched(
    drill: ResumeDrill, status: DrillStatus, sandbox: ResumableTrainingJob, now: float
) -> DrillStatus:
    """The drill's status with what its sandbox says, and the result once there is one."""
    status = _seen(drill, status, sandbox)
    end = _end_of(sandbox.status)
    if end is None:
        return status
    if end.passed and drill.spec.faults:
        return _in_spite(drill, status, end, now)
    return ending(drill, status, end)


def _in_spite(drill: ResumeDrill, status: DrillStatus, end: Ending, now: float) -> DrillStatus:
    """What matches has passed in spite of the faults only when all have happened. The last ones may be told late."""
    wanted, fired = sum(f.times for f in drill.spec.faults), status.faults_fired or 0
    if fired >= wanted:
        return ending(drill, status, replace(end, message=f"{end.message}; {many(fired, 'fault')} happened"))
    text = f"{end.message}; but {fired} of {many(wanted, 'fault')} happened"
    since = status.matched_at or _at(now)
    if now - since.timestamp() < FAULTS_LATE_SECONDS:
        status = told(drill, status, DrillPhase.RUNNING, DrillReason.FAULTS_NOT_FIRED, f"{text} by now")
        return status.model_copy(update={"matched_at": since})
    failed = Ending(False, DrillReason.FAULTS_NOT_FIRED, f"{text}: is every point passed so often?")
    return ending(drill, status, failed)


def _fired(drill: ResumeDrill, sandbox: ResumableTrainingJob) -> int:
    """How many of the drill's faults have happened: those in pods by the sidecars' word, those of the operator by its
    own. Neither stands in for the other."""
    ours, theirs = Counter[str](), 0
    for fault in drill.spec.faults:
        if fault.point in OPERATOR_POINTS:
            ours[fault.point] += fault.times
        else:
            theirs += fault.times
    in_pods = min(count(sandbox.status.faults_fired or 0), theirs)
    return in_pods + fired_by_operator(sandbox.metadata.annotations, ours)


def _seen(drill: ResumeDrill, status: DrillStatus, sandbox: ResumableTrainingJob) -> DrillStatus:
    seen, before = sandbox.status, status.sandbox
    assert before is not None, "what was begun has a sandbox"
    record = next(iter(reversed(seen.attempts)), None)
    update: dict[str, object] = {"sandbox": before.model_copy(update={"uid": sandbox.metadata.uid})}
    if seen.plan is not None:
        update["mesh"] = seen.plan.mesh
    if drill.spec.faults:
        update["faults_fired"] = _fired(drill, sandbox)
    if seen.resume is not None:
        update |= {"checks": seen.resume.compared, "loss_delta": seen.resume.loss_delta}
    if record is not None and record.seconds is not None:
        update |= {"seconds": record.seconds, "recovery_seconds": record.seconds.total}
    status = status.model_copy(update=update)
    reason = seen.reason or DrillReason.STARTING.value
    text = f"{before.name}: {seen.message}" if seen.message else f"{before.name} was created"
    return told(drill, status, DrillPhase.RUNNING, reason, text)


def read(drill: ResumeDrill, status: DrillStatus, job_uid: str, seen: Reading) -> DrillStatus:
    """The drill's status with what its reader says, and the result once there is one."""
    where, result = status.sandbox, seen.result
    assert where is not None, "what was begun has a sandbox"
    status = status.model_copy(update={"sandbox": where.model_copy(update={"uid": job_uid})})
    if seen.failed:
        return ending(drill, status, Ending(False, DrillReason.READER_FAILED, seen.failed))
    if result is None:
        return told(drill, status, DrillPhase.RUNNING, DrillReason.STARTING, f"{where.name}: {seen.text}")
    status = status.model_copy(update={"bytes": count(result.bytes)})
    if result.fault is not None:
        fault = result.fault
        text = (
            f"{fault.file} should be {fault.expected}, the reader found {fault.found}, twice; the operator has not "
            "found that itself, so nothing is quarantined for it"
        )
        return ending(drill, status, Ending(False, DrillReason.NOT_CONFIRMED, text))
    took = f"{result.seconds:.1f} s" if 0 <= result.seconds < _DAY else "some time"
    text = f"{count(result.bytes)} bytes were read in {took} and are what was saved"
    return ending(drill, status, Ending(True, DrillReason.BYTES_PROVEN, text))


def _end_of(seen: JobStatus) -> Ending | None:
    """What the sandbox has shown; None while it has not."""
    resume = seen.resume
    if resume is not None and resume.verified is not None:
        return _compared(seen)
    if seen.phase is Phase.COMPLETE:
        text = (
            "the sandbox finished before a step could be compared: training had ended at this checkpoint, or within "
            "verification.steps of it. Drill an earlier one"
        )
        return Ending(False, DrillReason.NOTHING_COMPARED, text)
    if seen.phase in (Phase.FAILED, Phase.INVALID):
        return Ending(False, seen.reason or DrillReason.SPEC_INVALID.value, seen.message or "")
    return None


def _compared(seen: JobStatus) -> Ending:
    resume = seen.resume
    assert resume is not None
    if resume.verified:
        loss = (
            f"largest relative difference of the loss {resume.loss_delta}"
            if resume.loss_delta is not None
            else "no loss was seen after this save, so the exact checks are all there is"
        )
        text = f"step {resume.step} restored, {many(resume.checks, 'check')} passed; {loss}"
        return Ending(True, DrillReason.MATCHED, text)
    failed = [c for c in resume.compared if not c.passed]
    told_so = "; ".join(f"{c.name}: expected {c.expected}, found {c.found}" for c in failed[:5])
    text = f"step {resume.step} restored, and {many(len(failed), 'check')} failed: {told_so}"
    return Ending(False, DrillReason.DIFFERS, f"{text}. See docs/resumes.md; nothing is quarantined for it")


def _at(now: float) -> datetime:
    return datetime.fromtimestamp(now, UTC)
