"""Errors of the training library. Each one names what was found, what was expected and the next step."""

from __future__ import annotations


class TrainingLibraryError(RuntimeError):
    """Base class of what this library raises on purpose."""


class EnvironmentMissing(TrainingLibraryError):
    """The process was not started by a launcher, or ranks and plan disagree."""


class SidecarLost(TrainingLibraryError):
    """The sidecar's socket cannot be reached within its deadline."""


class SidecarRefused(TrainingLibraryError):
    """The sidecar answered `Failure`; `word` is its stable CamelCase error."""

    def __init__(self, word: str, message: str) -> None:
        super().__init__(f"{word}: {message}")
        self.word, self.message = word, message

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        """Ranks hand each other what they met, by pickle (dcp.load)."""
        return type(self), (self.word, self.message)


class ResumeRefused(TrainingLibraryError):
    """The restore point does not fit this run (or cannot be read); every difference is named. Fail closed."""

    def __init__(self, differences: list[str]) -> None:
        self.differences = differences
        super().__init__("\n".join(differences))


def holds_folders(checkpoint_id: str) -> str:
    """Why neither a Session nor dcp.load takes a checkpoint."""
    return (
        f"checkpoint {checkpoint_id} holds folders that a framework has written, no tensors: only "
        "FolderSession.restore_folder gives them back (docs/own-folder.md)"
    )


class ResumeDiverged(ResumeRefused):
    """Training went on otherwise than the steps seen after the save, on the same mesh: the saved state is accused."""


class Fenced(TrainingLibraryError):
    """A newer attempt exists: this one may not commit any more and stops."""


STORE_AWAY = "StoreUnavailable"
"""Stands in the reason of a save that failed only because the store did not answer in time."""


class StagingFailed(TrainingLibraryError):
    """This rank could not stage its part of a save."""


class SaveFailed(TrainingLibraryError):
    """A save that the session had to wait for did not commit."""


class FolderRefused(TrainingLibraryError):
    """A framework's folder cannot be kept, or filled, as it is: the file is named."""


class FolderUnusable(TrainingLibraryError):
    """A framework's folder cannot be read or written at present (no space, no permission): a later attempt may fare
    better."""
