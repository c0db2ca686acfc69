"""Named places at which a test lets the operator die, to prove that what was done until then is found and gone on with.

Inert unless RTJ_OPERATOR_FAULT names a place. `<place>` dies at its first passing, `<place>:<n>` at its n-th, and
`<place>:<n>:stop` stops there until somebody continues it: an operator that was thought dead.
"""

import os
import signal
import sys

ENV_FAULT = "RTJ_OPERATOR_FAULT"
AFTER_STATUS_WRITE = "after-status-write"
AFTER_ATTEMPT_ENTRY = "after-attempt-entry"
AFTER_JOB_CREATE = "after-job-create"
AFTER_PLAN_ON_ONE_POD = "after-plan-publish-one-pod"
AFTER_REMOVAL = "after-removal-part"
PLACES = frozenset(
    {AFTER_STATUS_WRITE, AFTER_ATTEMPT_ENTRY, AFTER_JOB_CREATE, AFTER_PLAN_ON_ONE_POD, AFTER_REMOVAL}
)


class Faults:
    """Counts the passings of the one place that is to be fatal."""

    def __init__(self, setting: str) -> None:
        place, _, rest = setting.partition(":")
        count, _, how = rest.partition(":")
        if place and place not in PLACES:
            raise ValueError(
                f"{ENV_FAULT}={setting!r} names no place: use one of {', '.join(sorted(PLACES))}"
            )
        if how not in ("", "stop"):
            raise ValueError(f"{ENV_FAULT}={setting!r}: after the count there may be 'stop', not {how!r}")
        self._place, self._left, self._stops = place, int(count or 1), how == "stop"

    @classmethod
    def from_env(cls) -> "Faults":
        return cls(os.environ.get(ENV_FAULT, ""))

    def reached(self, place: str) -> None:
        """Die here with SIGKILL if this is the place and its turn has come."""
        if place != self._place:
            return
        self._left -= 1
        if self._left != 0:
            return
        if self._stops:
            print(f"fault {place}: stopping myself", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGSTOP)
            return
        self.die(place)

    def die(self, place: str) -> None:
        print(f"fault {place}: killing myself", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        os._exit(137)  # the first process of a container cannot be killed from inside
