"""`python bench [NAME ...]`: runs the named benchmarks (all without a name), prints a table and keeps the figures.

Each benchmark is a module of this folder with `measure(options) -> Iterable[Figure]`. Figures go to
`bench/out/results.json`
as they come, so that a benchmark that is stopped halfway leaves what it has measured; a picture of a benchmark's
targets beside it, `bench/out/<name>.png`.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "operator")]

from figures import Figure, NotMeasured, Results  # noqa: E402

BENCHES = {
    "datapath": "saves and restores against memcpy, raw S3 transfers and DCP; planning for a thousand ranks",
    "relaunch": "from the death of a process to all trainer processes started again (needs the local cluster)",
    "scale": "1,000 jobs of 4 simulated pods on a real API server (needs the programs of the local cluster)",
}


def main() -> int:
    """Exit code 1 when a figure misses its target."""
    listed = "\n".join(f"  {name:10} {text}" for name, text in BENCHES.items())
    parser = argparse.ArgumentParser(
        prog="make bench ARGS=...", epilog=listed, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help=f"of {', '.join(BENCHES)}; none: all of them")
    parser.add_argument("--kills", type=int, default=20, help="relaunch: kills of each kind")
    parser.add_argument("--kinds", default="", help="relaunch: kinds, comma-separated; empty: all")
    parser.add_argument("--jobs", type=int, default=1000, help="scale: jobs of four pods")
    parser.add_argument("--failures", type=int, default=300, help="scale: pods that fail")
    parser.add_argument("--idle-seconds", type=int, default=240, help="scale: how long nothing happens")
    parser.add_argument("--megabytes", type=int, default=256, help="datapath: size of the model")
    parser.add_argument("--rounds", type=int, default=7, help="datapath: warm saves, at least 5")
    parser.add_argument("--quick", action="store_true", help="datapath: the rows that change most often")
    options = parser.parse_args()
    unknown = sorted(set(options.names) - set(BENCHES))
    if unknown:
        parser.error(f"no benchmark is called {', '.join(unknown)}: there are {', '.join(BENCHES)}")
    results = Results(Path(__file__).with_name("out") / "results.json")
    measured: list[Figure | NotMeasured] = []
    for name in options.names or BENCHES:
        begun = len(measured)
        for row in importlib.import_module(name).measure(options):
            results.add(row)
            measured.append(row)
        picture = Path(__file__).with_name("out") / f"{name}.png"
        if results.plot([row.name for row in measured[begun:]], picture):
            print(f"{name}: drawn in {picture}", flush=True)
    print(results.table([row.name for row in measured]))
    return int(any(isinstance(row, Figure) and row.holds is False for row in measured))


if __name__ == "__main__":
    sys.exit(main())
