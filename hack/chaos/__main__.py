"""`make soak-cluster`: jobs on the real cluster, random faults for half an hour, and an audit of every job.

Exit codes: 0 nothing was wrong, 1 something was (the seed and the folder are named), 2 usage.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(
    0, str(Path(__file__).resolve().parents[2])
)  # `python hack/chaos` puts hack/chaos itself there

PACE_SECONDS, STEP_SECONDS = 0.5, 0.7
"""What a step sleeps, and what it takes with its share of what faults cost: the jobs end soon after the faults."""


def main(argv: list[str]) -> int:
    """Play the schedule of a seed and print the tally."""
    parser = argparse.ArgumentParser(prog="hack/chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30, help="how long faults happen (default 30)")
    parser.add_argument("--seed", type=int, default=1, help="of the schedule (default 1)")
    parser.add_argument("--jobs", type=int, default=3, help="how many jobs (default 3)")
    parser.add_argument("--out", type=Path, default=Path("chaos-out"), metavar="DIR", help="for the report")
    parser.add_argument("--schedule", action="store_true", help="only print the schedule of the seed")
    arguments = parser.parse_args(argv)
    if arguments.minutes <= 0 or arguments.jobs < 1:
        parser.error(f"--minutes {arguments.minutes:g} and --jobs {arguments.jobs} must be above 0")

    from hack.chaos.schedule import of_length

    schedule = of_length(arguments.seed, 60 * arguments.minutes)
    print(schedule, flush=True)
    if arguments.schedule:
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started is ended
    return _soak(arguments, arguments.out.resolve() / f"seed-{arguments.seed}-{time.strftime('%H%M%S')}")


def _soak(arguments: argparse.Namespace, out: Path) -> int:
    from hack.chaos.record import ChaosError
    from hack.chaos.report import tally, write
    from hack.chaos.schedule import of_length
    from hack.chaos.soak import Size, keep, soak
    from hack.cluster_world import World
    from hack.demo.settings import DemoError

    schedule = of_length(arguments.seed, 60 * arguments.minutes)
    (out / "ledgers").mkdir(parents=True)
    (out / "schedule.json").write_text(json.dumps(schedule.to_json(), indent=1) + "\n")
    steps = 100 + int(60 * arguments.minutes / STEP_SECONDS)
    world, began = World(out / "ledgers"), time.monotonic()
    again = f"hack/chaos --minutes {arguments.minutes:g} --seed {arguments.seed} --jobs {arguments.jobs}"
    try:
        world.up()
        os.environ.update(
            {n: world.cluster.variables[n] for n in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")}
        )
        size = Size(jobs=arguments.jobs, steps=steps, pace=PACE_SECONDS)
        outcome = soak(world, schedule, size, lambda text: print(text, flush=True))
        seconds = time.monotonic() - began
        write(outcome, seconds, out / "report.json")
        print(tally(outcome, seconds))
        if outcome.wrong:
            keep(world, outcome, out)
            print(f"  journals, ledgers, events and logs: {out}; again: {again}")
        return 1 if outcome.wrong else 0
    except (ChaosError, DemoError, AssertionError) as error:
        (out / "cluster.txt").write_text(world.diagnosis())
        print(f"chaos: {error}\n  what stood in the cluster: {out}; again: {again}", file=sys.stderr)
        return 1
    finally:
        world.down()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
