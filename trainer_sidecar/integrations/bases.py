"""Where the part that resumes stands among a class's bases: behind the framework's trainer it takes no effect."""

from __future__ import annotations

from collections.abc import Callable


def refuse_behind(cls: type, part: type, is_trainer: Callable[[type], bool]) -> None:
    """Raises TypeError, as the class is made, when the framework's trainer comes before `part` in its bases, or one
    derived from it that has methods of its own where `part` has some: what `part` does would be skipped."""
    kinds = [kind for kind in cls.__mro__[: cls.__mro__.index(part)] if not issubclass(kind, part)]
    before = [kind for kind in kinds if any(map(is_trainer, kind.__mro__))]
    whole = any(map(is_trainer, before))
    for kind in before:
        what = "everything" if whole else ", ".join(_hidden(kind, part))
        if what:
            names = [base.__name__ for base in cls.__bases__]
            first = sorted(cls.__bases__, key=lambda base: not issubclass(base, part))
            raise TypeError(
                f"class {cls.__name__}({', '.join(names)}): {kind.__name__} comes before {part.__name__}, and hides "
                f"{what} of it, by which training is restored and saved: write "
                f"class {cls.__name__}({', '.join(base.__name__ for base in first)})"
            )


def _hidden(kind: type, part: type) -> list[str]:
    own = {name for name, value in vars(part).items() if callable(value)} - {"__init_subclass__"}
    return sorted(own & vars(kind).keys())


def refuse_alone(cls: type, part: type, is_trainer: Callable[[type], bool], trainer: str) -> None:
    """Raises TypeError, as an object is made, when no trainer comes behind `part`. `trainer`: the framework's name."""
    if not any(map(is_trainer, cls.__mro__)):
        raise TypeError(
            f"{cls.__name__} has no {trainer} Trainer among its bases: class {cls.__name__}({part.__name__}, Trainer)"
        )
