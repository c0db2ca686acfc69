"""`python train.py` on one machine: with a store in the environment, the script starts again under `rtj run`.

One process needs a sidecar and a launcher beside it to be resumable. Rather than a second, weaker way of saving, the
script replaces itself by `rtj run --nproc 1 -- <itself>` at its first call into the library; what it did before that is
done once more. `RTJ_RUN_OPTIONS` holds further options of `rtj run`. Several ranks without `rtj run` are an error.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from trainer_sidecar.contract.volume import ENV_PLAN, ENV_STORE_URL

ENV_RUN_OPTIONS = "RTJ_RUN_OPTIONS"
_ENV_STARTED = "RTJ_STARTED_ITSELF"
"""Set for the new process, so that a rank without a plan cannot start itself for ever."""


def command(
    env: Mapping[str, str], world_size: int, main: Any = None, argv: Sequence[str] | None = None
) -> list[str] | None:
    """The command that starts this script under `rtj run`; None when it cannot or should not be.

    `main` is the module `__main__`, `argv` its arguments with the script's name first.
    """
    if env.get(ENV_PLAN) or not env.get(ENV_STORE_URL) or env.get(_ENV_STARTED) or world_size > 1:
        return None
    main = main or sys.modules["__main__"]
    argv = argv or sys.argv
    script = _script(main)
    if script is None:
        return None
    options = shlex.split(env.get(ENV_RUN_OPTIONS, ""))
    return [
        sys.executable,
        "-m",
        "trainer_sidecar.cli",
        "run",
        "--nproc",
        "1",
        *options,
        "--",
        *script,
        *argv[1:],
    ]


def _script(main: Any) -> list[str] | None:
    """How to start `__main__` again; None in a notebook or at a prompt."""
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name != "__main__":
        return ["-m", spec.name.removesuffix(".__main__")]
    path = getattr(main, "__file__", None)
    if not path or hasattr(sys, "ps1") or not Path(path).is_file():
        return None
    return [str(Path(path).resolve())]


def start_again(
    env: Mapping[str, str],
    world_size: int,
    replace: Callable[[str, list[str], dict[str, str]], NoReturn] = os.execve,
) -> None:
    """Replace this process by its run under `rtj run`, if it should be; else return."""
    arguments = command(env, world_size)
    if arguments is None:
        return
    print(f"rtj: {ENV_STORE_URL} is set and there is no plan: {shlex.join(arguments[3:])}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    replace(sys.executable, arguments, {**env, _ENV_STARTED: "1"})
