"""What a script may give in `session=` of a trainer: arguments of `Session.from_env` that the framework does not give
itself. What would replace those, or is none, is refused by name before anything begins."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

_FREE = ("extra", "per_rank", "fingerprints", "accept")


def refuse_options(
    given: Mapping[str, Any], settings: Mapping[str, str], free: Collection[str] = _FREE
) -> None:
    """Raises ValueError for keys that are not `free`. `settings`: where the script sets what is the framework's."""
    for key in given:
        if key not in free:
            where = f": it is {settings[key]}" if key in settings else ""
            raise ValueError(f'session={{"{key}": ...}}{where}; session= takes {", ".join(free)}')


def refuse_extra(given: Mapping[str, Any], taken: Collection[str]) -> None:
    """Raises ValueError for an object of `extra` under a name that the integration saves its own by."""
    for name in given.get("extra") or {}:
        if name in taken:
            raise ValueError(
                f'session={{"extra": {{"{name}": ...}}}}: that name is taken by what the trainer itself keeps, which '
                "would be lost: give yours another"
            )
