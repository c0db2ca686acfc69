"""What is in the way of a fence, as the reason that the job's status shows."""

from rtj_operator.conditions import Reason
from trainer_sidecar.store.base import (
    AccessDeniedError,
    BucketMissingError,
    ClockSkewError,
    UnsupportedStoreError,
)
from trainer_sidecar.store.fence import (
    ForkSourceError,
    NothingRestorableError,
    RunExistsError,
    RunTakenOverError,
    SupersededError,
)
from trainer_sidecar.store.journal import JournalLostError, JournalTooNewError
from trainer_sidecar.store.verify import BadCheckpointError, FormatTooNewError


class FenceTrouble(Exception):
    """The store, or what stands in it, is in the way. `final`: nothing but a change of the spec helps. `about`: what
    was to be done, when that was no attempt."""

    def __init__(self, reason: Reason, message: str, *, final: bool = False, about: str = "") -> None:
        super().__init__(message)
        self.reason, self.final, self.about = reason, final, about


class PlanRefused(Exception):
    """The mesh at this size cannot resume what the restore point saved."""


def trouble(exc: Exception) -> FenceTrouble:
    """The reason that a failed fence has in the job's status."""
    reasons: list[tuple[type[Exception], Reason, bool]] = [
        (RunTakenOverError, Reason.RUN_TAKEN_OVER, True),
        (RunExistsError, Reason.RUN_EXISTS, True),
        (ForkSourceError, Reason.FORK_SOURCE_UNUSABLE, True),
        (SupersededError, Reason.ATTEMPT_SUPERSEDED, False),
        (NothingRestorableError, Reason.NOTHING_RESTORABLE, True),
        (JournalLostError, Reason.JOURNAL_LOST, False),
        (FormatTooNewError, Reason.SCHEMA_MISMATCH, False),
        (JournalTooNewError, Reason.SCHEMA_MISMATCH, False),
        (BadCheckpointError, Reason.RESTORE_POINT_BAD, False),
        (PlanRefused, Reason.TRANSITION_BLOCKED, False),
        (AccessDeniedError, Reason.STORE_ACCESS_DENIED, False),
        (ClockSkewError, Reason.CLOCK_SKEWED, False),
        (UnsupportedStoreError, Reason.STORE_UNSUPPORTED, False),
        (BucketMissingError, Reason.STORE_UNAVAILABLE, False),
    ]
    in_doubt = isinstance(exc, NothingRestorableError) and exc.in_doubt
    for kind, reason, final in reasons:
        if isinstance(exc, kind):
            final = final and not in_doubt
            return FenceTrouble(reason, str(exc), final=final)
    return FenceTrouble(Reason.STORE_UNAVAILABLE, f"{type(exc).__name__}: {exc}")
