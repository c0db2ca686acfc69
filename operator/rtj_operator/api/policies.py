"""Choices of the spec and words of the status, one StrEnum each. Their values are API: they never change meaning."""

from enum import StrEnum

from trainer_sidecar.contract.plan import AccumulationSave, OnVerificationFailure, WhenBusy

__all__ = [
    "AccumulationSave",
    "CompatibilityStatus",
    "DeletionPolicy",
    "IntervalPolicy",
    "Medium",
    "OnFingerprintChange",
    "OnVerificationFailure",
    "Phase",
    "RestartAction",
    "WhenBusy",
]


class IntervalPolicy(StrEnum):
    """Who chooses the save interval."""

    FIXED = "Fixed"
    AUTO = "Auto"


class Medium(StrEnum):
    """What the shared volume of trainer and sidecar lies on."""

    MEMORY = "Memory"
    DISK = "Disk"


class OnFingerprintChange(StrEnum):
    """What a changed fingerprint means for a resume."""

    ACCEPT = "Accept"
    ASK = "Ask"
    REFUSE = "Refuse"


class CompatibilityStatus(StrEnum):
    """Whether a transition of the matrix may be used."""

    VERIFIED = "verified"
    BLOCKED = "blocked_until_drill_passes"


class RestartAction(StrEnum):
    """What a matching restart rule does."""

    RESTART = "Restart"
    RESTART_UNCOUNTED = "RestartUncounted"
    EXCLUDE_NODE = "ExcludeNode"
    FAIL = "Fail"


class DeletionPolicy(StrEnum):
    """What happens to the checkpoints when the object is deleted."""

    RETAIN = "Retain"
    DELETE = "Delete"


class Phase(StrEnum):
    """One word for people and the Phase column. Programs read the conditions."""

    PENDING = "Pending"
    """Nothing runs yet: being validated, or waiting for capacity."""
    STARTING = "Starting"
    """Pods are up or coming up; ranks do not train yet."""
    RESTORING = "Restoring"
    RUNNING = "Running"
    SAVING = "Saving"
    """Ordered to save and exit (resize, suspend, new spec)."""
    RECOVERING = "Recovering"
    """An attempt ended; the next one is being prepared."""
    SUSPENDED = "Suspended"
    COMPLETE = "Complete"
    FAILED = "Failed"
    INVALID = "Invalid"
    """The spec cannot run; the condition Valid says why."""
    DELETING = "Deleting"
    """The object is deleted, and its checkpoints with it (`deletionPolicy: Delete`)."""
