"""How an attempt's processes ended in one pod: file, termination message, `/status` (operator.md O5, O8, O9).

Ranks write `outcome/<epoch>/rank-<rank:05d>.json`; the launcher merges them into a pod outcome,
`outcome/<epoch>/pod.json`, which beats the exit code of a rank whose script had ended (datapath T22).
The launcher is standard library only: it writes the same JSON by hand.
"""

from enum import StrEnum

from trainer_sidecar.contract.base import Document


class OutcomeKind(StrEnum):
    """One word for the end of a pod's ranks. Merge order for a pod: the first of this list that any rank had wins."""

    RESUME_REFUSED = "ResumeRefused"
    FAILED = "Failed"
    FENCED = "Fenced"
    SAVED_AND_STOPPED = "SavedAndStopped"
    """Stopped on order after its commit."""
    STOPPED = "Stopped"
    """Stopped without a commit of its own (order Stop, or nothing to save)."""
    FINISHED = "Finished"


class RankFailure(Document):
    """First failing rank: global rank, exit code (negative = signal), last 1 KiB of traceback or log."""

    rank: int
    exit_code: int | None = None
    signal: str | None = None
    error: str = ""


class Outcome(Document):
    """End of one epoch's ranks in one pod."""

    epoch: int
    attempt: int
    kind: OutcomeKind
    step: int | None = None
    message: str = ""
    failure: RankFailure | None = None
    end_reached: bool = False
    """The ranks have taken the last step that the script declared (`total_steps`, `epochs`). False for a script that
    declares no end, or that has left its loop before: started again, it would train on."""
    oom_kills: int = 0
    """Processes of the trainer's cgroup that the kernel killed for memory during this epoch. The launcher counts
    (`oom_kill` of its own `memory.events`): another container's cgroup is not visible to the sidecar."""

    @property
    def killed_for_memory(self) -> bool:
        """The kernel killed processes for memory, and no rank ended in another way: the first to fail ended by
        SIGKILL, or torchrun was killed too, before any rank's end was reported."""
        by_kill = self.failure is None or self.failure.signal in ("SIGKILL", "9")
        return self.kind is OutcomeKind.FAILED and self.oom_kills > 0 and by_kill


EXIT_CODES: dict[OutcomeKind, int] = {
    OutcomeKind.FINISHED: 0,
    OutcomeKind.FAILED: 1,
    OutcomeKind.RESUME_REFUSED: 78,
    OutcomeKind.FENCED: 143,
    OutcomeKind.SAVED_AND_STOPPED: 143,
    OutcomeKind.STOPPED: 143,
}
"""Exit code of `rtj-launch` when it ends with that outcome. A preempted exit is never 0 (operator.md O8)."""
