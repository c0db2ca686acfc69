"""`status.checkpointInterval`: how often the job saves, how often it should, and the numbers that say so."""

from pydantic import Field

from rtj_operator.api.base import ApiModel
from rtj_operator.api.policies import IntervalPolicy


class CheckpointInterval(ApiModel):
    """Between the beginnings of two saves: what applies, and what wastes least."""

    policy: IntervalPolicy = IntervalPolicy.FIXED
    """Who chooses it."""
    seconds: int | None = Field(default=None, ge=0)
    """What applies: with policy Auto chosen by the operator, with Fixed the spec's shorter one at the present pace."""
    steps: int | None = Field(default=None, ge=0)
    """About so many steps, at the pace of the newest commit."""
    advised_seconds: int | None = Field(default=None, ge=0)
    """What wastes least, and not less than a save takes from stage to commit."""
    save_cost_seconds: float | None = None
    """Seconds of training that a save costs: ranks that stand, and slower steps beside it."""
    mtbf_seconds: int | None = Field(default=None, ge=0)
    """Mean time between failures that lose work, of the job on the nodes that it has: measured, from a cautious
    beginning."""
    restart_seconds: float | None = None
    """From the end of the ranks to the next attempt's first step, median of those recorded."""
    wasted_fraction: float | None = None
    """Share of the time that saves, steps run again and restarts are expected to take at `seconds`."""
    failures: int = Field(default=0, ge=0)
    """Attempts that ended with work lost. Saved and stopped in time (suspend, resize, preemption) is none."""
    node_seconds: int = Field(default=0, ge=0)
    """Seconds of training of the attempts that have ended, times their nodes."""
