"""Errors of the DCP classes. torch gathers the exceptions of all ranks by pickle, so each holds one sentence only."""

from __future__ import annotations

from trainer_sidecar.train.errors import TrainingLibraryError


class SaveInFlight(TrainingLibraryError):
    """A save was begun before the one before it had ended."""


class CheckpointRefused(TrainingLibraryError):
    """There is no such restore point, or it cannot be read: file, expected and found are named."""
