"""Settings that the script changed and the checkpoint puts back: an edited learning rate would be lost unseen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from trainer_sidecar.train import tagged

_MOVES = {"lr", "momentum", "betas"}
"""Fields of a group that a scheduler moves as it goes."""
_HOW = "to change it, set it after Session.from_env (with Trainer: in on_train_begin of a callback)"
_PROGRESS = {
    "last_epoch",
    "best",
    "num_bad_epochs",
    "cooldown_counter",
    "mode_worse",
    "T_cur",
    "T_i",
    "total_steps",
}


def kept_settings(
    saved: tuple[Sequence[Any], Sequence[Any]], now: tuple[Sequence[Any], Sequence[Any]]
) -> list[str]:
    """One sentence for each setting of which the checkpoint's value goes on instead of the script's.

    Both are (optimizers' documents, schedulers' state dicts in tagged JSON) that have been found to fit.
    """
    found: list[str] = []
    for i, (old, new) in enumerate(zip(saved[0], now[0], strict=True)):
        groups = {tuple(group["params"]): group["fields"] for group in old["groups"]}
        for number, group in enumerate(new["groups"]):
            before = groups[tuple(group["params"])]
            skip = _MOVES if "initial_lr" in before else set()
            where = f"of group {number} of optimizer {i}"
            found += _changed(where, before, group["fields"], skip)
    for i, (old, new) in enumerate(zip(saved[1], now[1], strict=True)):
        found += _changed(f"of scheduler {i}", _plain(old), _plain(new), _PROGRESS)
    return found


def _plain(document: Any) -> dict[str, Any]:
    """Entries of a scheduler's state that are numbers, strings or lists of such."""
    return {key: value for key, value in document.items() if not key.startswith("_") and not _deep(value)}


def _deep(value: Any) -> bool:
    return any(_deep(v) or isinstance(v, dict) for v in value) if isinstance(value, list) else False


def _changed(where: str, old: dict[str, Any], new: dict[str, Any], skip: set[str]) -> Iterator[str]:
    for key in sorted(old.keys() & new.keys() - skip):
        if old[key] != new[key]:
            yield (
                f"{key} {where}: {tagged.decode(old[key])} of the checkpoint goes on, {tagged.decode(new[key])} of the "
                f"script is not used; {_HOW}"
            )
