"""How an attempt of `rtj run` ended, whether another one may follow, and what is said and returned when none does.

Values in, values out. What a refused resume says is told apart as in a cluster, by `kind_of_refusal`.
"""

from dataclasses import dataclass

from trainer_sidecar.contract.journal import Cause
from trainer_sidecar.contract.outcome import EXIT_CODES, Outcome, OutcomeKind
from trainer_sidecar.contract.restore_fault import Refusal, kind_of_refusal

_MAY_PASS = (Refusal.STORE_AWAY, Refusal.PASSING)
EXIT_STORE = 69
"""As of every command that cannot use its store."""


@dataclass
class Ended:
    """How an attempt ended, and why the next one would start."""

    outcome: Outcome
    cause: Cause = Cause.RANK_FAILED
    retry: bool = False
    """It may be gone the next time: it is counted, and tried again while the budget lasts."""

    @property
    def refusal(self) -> Refusal | None:
        """What a refused resume says; None for every other end."""
        refused = self.outcome.kind is OutcomeKind.RESUME_REFUSED
        return kind_of_refusal(self.outcome.message) if refused else None

    @property
    def exit_code(self) -> int:
        """Of `rtj run`, when this end is the last one. 78 only where the checkpoint does not fit, or is bad."""
        passing = {Refusal.STORE_AWAY: EXIT_STORE, Refusal.PASSING: EXIT_CODES[OutcomeKind.FAILED]}
        return passing[self.refusal] if self.refusal in passing else EXIT_CODES[self.outcome.kind]

    def advice(self, store_url: str) -> str:
        """What to do after a refusal that nothing follows; empty for other ends."""
        if self.refusal is None:
            return ""
        if self.refusal is Refusal.STORE_AWAY:
            return (
                f"{store_url} could not be read, which says nothing about checkpoint or script: see that it answers "
                f"(rtj store probe --store {store_url}), then run the same command again"
            )
        if self.refusal is Refusal.PASSING:
            return (
                "that says nothing about checkpoint or script: correct what is named there, then run the same command "
                "again"
            )
        return "the checkpoints are untouched: run the script that they fit, or begin a new run with --run-id"


def ended_by(outcome: Outcome, *, stopped: bool) -> Ended:
    """The end that ranks or launcher have told. `stopped`: somebody has asked to stop, nothing follows."""
    cause = Cause.OOM_KILLED if outcome.killed_for_memory else Cause.RANK_FAILED
    ended = Ended(outcome, cause=cause)
    if ended.refusal is Refusal.STORE_AWAY:
        ended.cause = Cause.OPERATOR  # no rank has failed; as the operator has it
    ended.retry = not stopped and (outcome.kind is OutcomeKind.FAILED or ended.refusal in _MAY_PASS)
    return ended
