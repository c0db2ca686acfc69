"""`make demo`: one job through a killed rank, a lost node and its return, against a control run, with proofs.

Exit codes: 0 everything was proven, 1 a proof failed, something did not happen in time, or could not be taken away
again, 2 usage, 130 interrupted.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # `python hack/demo` puts hack/demo itself there


def main() -> int:
    """Run the demo."""
    from hack.demo.demo import main as demo

    return demo(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
