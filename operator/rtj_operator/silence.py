"""Since when a pod's sidecar has left every ask unanswered, by this process' own clock: what a lost pod is judged by.

It counts from the first ask without an answer, never from the last answer: most sidecars of a job that trains
undisturbed are asked only when there is a reason to (operator.md O10), and a missed answer after an hour of peace is
one missed answer, no hour of silence. Nothing here decides.
"""

from dataclasses import dataclass, field

MOST_REMEMBERED = 8192
GAP_SECONDS = 120.0
"""Unanswered asks further apart are no silence: this process may have been stopped, and knows nothing of between."""


@dataclass(frozen=True)
class _Unanswered:
    first: float
    last: float


@dataclass
class Silence:
    """The unanswered asks of each pod, by uid; those of longest ago are forgotten first."""

    _unanswered: dict[str, _Unanswered] = field(default_factory=dict)

    def doubts(self, uid: str) -> bool:
        """Its last ask was left unanswered: the next look must ask it again."""
        return uid in self._unanswered

    def answered(self, uid: str) -> None:
        """It lives: silence begins anew with the next ask that it leaves unanswered."""
        self._unanswered.pop(uid, None)

    def missed(self, uid: str, asked: float, now: float) -> float:
        """Seconds since the first of the unanswered asks in a row. `asked`, when this one was sent, and `now`, when it
        was given up, are monotonic."""
        before = self._unanswered.pop(uid, None)
        in_a_row = before is not None and asked - before.last <= GAP_SECONDS
        first = before.first if before is not None and in_a_row else asked
        self._unanswered[uid] = _Unanswered(first, asked)
        if len(self._unanswered) > MOST_REMEMBERED:
            del self._unanswered[next(iter(self._unanswered))]
        return now - first
