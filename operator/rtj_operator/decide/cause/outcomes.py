"""What the ranks of a pod have left as their outcome, as a cause and as a sentence."""

from rtj_operator.decide.observed import PodView
from rtj_operator.text import printable
from trainer_sidecar.contract.journal import Cause
from trainer_sidecar.contract.outcome import Outcome, OutcomeKind

TRACEBACK_CHARS = 1024
EXIT_USAGE = 2
_TERMINATED = (-15, 143)
"""Exit codes of a process that SIGTERM ended, and of a shell around one."""
_DONE = frozenset({OutcomeKind.FINISHED, OutcomeKind.SAVED_AND_STOPPED, OutcomeKind.STOPPED})


def ended_well(pod: PodView, epoch: int) -> bool:
    """The pod's ranks have finished, or have stopped as they were told to."""
    outcome = pod.outcome(epoch)
    return outcome is not None and outcome.kind in _DONE


def ended_by_sigterm(outcome: Outcome) -> bool:
    """The first rank to end did so by the signal that a deletion sends. A script's own error has a code of its own."""
    failure = outcome.failure
    return failure is not None and (failure.signal == "SIGTERM" or failure.exit_code in _TERMINATED)


def failure_cause(outcome: Outcome) -> Cause:
    """Of ranks that failed: by the kernel for want of memory, or by themselves."""
    return Cause.OOM_KILLED if outcome.killed_for_memory else Cause.RANK_FAILED


def failure_text(outcome: Outcome) -> str:
    """The first failing rank, how it ended and the last line of its error."""
    failure = outcome.failure
    if failure is None:
        return printable(outcome.message[:4096]) or outcome.kind.value
    how = f"signal {failure.signal}" if failure.signal else f"exit code {failure.exit_code}"
    lines = printable(failure.error[-4096:]).strip().splitlines()
    last = lines[-1] if lines else ""
    return f"rank {failure.rank} ended with {how}" + (f": {last}" if last else "")


def traceback_of(outcome: Outcome) -> str:
    """What the first failing rank wrote to stderr last, at most 1 KiB."""
    return printable(outcome.failure.error[-TRACEBACK_CHARS:]).strip() if outcome.failure else ""
