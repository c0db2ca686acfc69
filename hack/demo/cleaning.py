"""Taking away what a demo has brought: each step on its own, so that one that fails does not keep the others back, and
what is left is told with the command that takes it away by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hack.demo.console import Console
from hack.demo.settings import DemoError


@dataclass(frozen=True)
class Step:
    """One thing to take away."""

    what: str
    do: Callable[[], str]
    """Takes it away and says so; an empty text says nothing."""
    by_hand: str
    """Command that does the same."""


def take_away(steps: Sequence[Step], console: Console) -> None:
    """Do every step, in order. Raises DemoError with all that is left; Ctrl-C leaves the rest of the steps."""
    left: list[str] = []
    for number, step in enumerate(steps):
        try:
            if said := step.do():
                console.say(said)
        except KeyboardInterrupt:
            left += [_told(other, "interrupted") for other in steps[number:]]
            break
        except Exception as error:  # whatever it is, the other steps are still to be done
            left.append(_told(step, str(error) or type(error).__name__))
    if left:
        raise DemoError("\n".join(["this is left; by hand, in this order:", *left]))


def _told(step: Step, why: str) -> str:
    reason = why.strip().replace("\n", "\n      ")
    return f"  - {step.what}: {reason}\n    {step.by_hand}"
