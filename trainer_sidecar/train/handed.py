"""Each batch is closed once: a further micro_end or step_end would count samples that nobody has trained on."""

from __future__ import annotations

from trainer_sidecar.train.errors import TrainingLibraryError


class Handed:
    """The batches that the session gave last. A script that never asks for one feeds itself and is not judged."""

    def __init__(self) -> None:
        self._open: int | None = None

    def given(self, count: int) -> None:
        self._open = count

    def close(self, call: str, step: int, *, last: bool = False) -> bool:
        """By `call` in the step that is under way; `last`: step_end is still to come. Returns whether there is a batch.

        Raises TrainingLibraryError when all are closed already.
        """
        if self._open == 0:
            raise TrainingLibraryError(
                f"{call}() was called again in step {step} without another batch of the session: its samples "
                "would be skipped. Call micro_end() and step_end() once for each batch"
            )
        if self._open and not last:
            self._open -= 1
        return self._open is not None
