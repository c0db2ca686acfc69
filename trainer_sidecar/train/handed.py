"""Each batch is closed once: a further micro_end or step_end would count samples that nobody has trained on."""

from __future__ import annotations

from trainer_sidecar.train.errors import TrainingLibraryError


class Handed:
    """The batch that `batches()` gave last. A script that never asks for one feeds itself and is not judged."""

    def __init__(self) -> None:
        self._open: bool | None = None

    def given(self) -> None:
        self._open = True

    def close(self, call: str, step: int, *, last: bool = False) -> bool:
        """By `call` in the step that is under way; `last`: step_end is still to come. Returns whether there is a batch.

        Raises TrainingLibraryError when it is closed already.
        """
        if self._open is False:
            raise TrainingLibraryError(
                f"{call}() was called again in step {step} without another batch of session.batches(): its samples "
                "would be skipped. Call micro_end() and step_end() once for each batch"
            )
        fed = self._open is not None
        if fed and not last:
            self._open = False
        return fed
