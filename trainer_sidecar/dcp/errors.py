"""Errors of the DCP classes. torch gathers the exceptions of all ranks by pickle, so each holds one sentence only."""

from __future__ import annotations

from trainer_sidecar.train.errors import TrainingLibraryError


class SaveInFlight(TrainingLibraryError):
    """A save was to begin, and the one before it has not ended within its time-out."""


class CheckpointRefused(TrainingLibraryError):
    """There is no such restore point, or it cannot be read: file, expected and found are named."""


class RestorePointNotLoaded(TrainingLibraryError):
    """A save was to begin in an attempt that goes on from a checkpoint, which this process has not loaded."""
