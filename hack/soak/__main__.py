"""`make soak`: thousands of random kills around saves of four ranks on a real S3 server; nothing may be lost or faked.

Exit codes: 0 nothing was wrong, 1 something was (the seed and the folder are named), 2 usage.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # `python hack/soak` puts hack/soak itself there


def main(argv: list[str]) -> int:
    """Run the schedules and print the tally."""
    parser = argparse.ArgumentParser(prog="hack/soak", description=__doc__)
    parser.add_argument("--schedules", type=int, default=1000, metavar="N", help="how many (default 1000)")
    parser.add_argument("--seed", type=int, default=1, help="first seed; schedule i has seed + i (default 1)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where a failed schedule's files are kept")
    parser.add_argument("--quiet", action="store_true", help="only the tally")
    parser.add_argument(
        "--outage",
        type=float,
        metavar="SECONDS",
        help="instead: the drills with the store away, each outage so long (five minutes: 300)",
    )
    args = parser.parse_args(argv)
    if args.outage is not None:
        return outage_drills(args.outage)
    if args.schedules < 1:
        parser.error(f"--schedules {args.schedules} is below 1")

    from hack.soak.campaign import Campaign
    from hack.soak.server import ServerError

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started is ended, the tally is told

    try:
        return Campaign(args.schedules, args.seed, args.out, quiet=args.quiet).run()
    except ServerError as exc:
        print(f"soak: {exc}", file=sys.stderr)
        return 1


def outage_drills(seconds: float) -> int:
    """Run the D7 drills of the test suite with long outages; pytest's exit code."""
    drills = Path(__file__).resolve().parents[2] / "tests/drills/test_d7_store_away.py"
    environment = {**os.environ, "RTJ_DRILL_OUTAGE_SECONDS": str(seconds)}
    return subprocess.call([sys.executable, "-m", "pytest", "-q", "-s", str(drills)], env=environment)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
