"""Why an attempt may not start. Every message says what to do; none of these ever means "from scratch"."""


class FenceError(Exception):
    """An attempt may not start. The message says why and what to do."""

    reason = "FenceRefused"


class RunTakenOverError(FenceError):
    """This run was ours and another owner has fenced it since (R8)."""

    reason = "RunTakenOver"


class RunExistsError(FenceError):
    """The run belongs to another owner and the spec does not adopt it (R8)."""

    reason = "RunExists"


class SupersededError(FenceError):
    """This attempt stands in the journal and a later one has fenced it already."""

    reason = "Superseded"


class NothingRestorableError(FenceError):
    """Commits exist and none can be restored (R11, R24). Never a start from scratch."""

    reason = "NothingRestorable"

    def __init__(self, message: str, *, in_doubt: bool = False) -> None:
        super().__init__(message)
        self.in_doubt = in_doubt
        """A journal entry could not be read: later it may be, and then some can be restored."""


class ForkSourceError(FenceError):
    """The checkpoint to fork from does not exist, or may not be used any more."""

    reason = "ForkSource"
