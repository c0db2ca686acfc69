"""From the death of a process to all trainer processes started again, on the local cluster, with where the time goes.

Two pods on two nodes, warm images, a real operator, real sidecars and launchers. The ranks are the stand-ins of the
operator's tests, so that torch's own start-up, seconds on any machine, is not part of it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from figures import Figure, quantile, spread

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "operator"))

from relaunch.kills import Kill, kills
from relaunch.kinds import KINDS, Kind

PEER = "JobSet, Recreate: 4.6 s on the same kind of cluster"


def measure(options: argparse.Namespace) -> Iterable[Figure]:
    """The median of each kind, and its parts."""
    from operator_world import nobody_else, prepare

    wanted = [w for w in options.kinds.split(",") if w] or list(KINDS)
    unknown = sorted(set(wanted) - set(KINDS))
    if unknown:
        raise SystemExit(f"no kind is called {', '.join(unknown)}: there are {', '.join(KINDS)}")
    env = prepare()
    with nobody_else(env), tempfile.TemporaryDirectory(prefix="rtj-bench-") as folder:
        for name in wanted:
            yield from _figures(KINDS[name], list(kills(KINDS[name], options.kills, env, Path(folder))))


def _figures(kind: Kind, measured: list[Kill]) -> Iterable[Figure]:
    totals = [k.total for k in measured]
    yield Figure(f"relaunch: {kind.title}", quantile(totals, 0.5), "s", kind.target, spread(totals), PEER)
    for part in measured[0].parts:
        values = [k.parts[part] for k in measured]
        yield Figure(f"relaunch: {kind.title}: {part}", quantile(values, 0.5), "s", None, spread(values))
