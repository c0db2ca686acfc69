"""The stand-in rank of the operator's tests, which also writes down when it started, sealed and committed.

The first line is written before anything is imported: what comes after it is the script's own start-up. Environment:
BENCH_LOG, a file; BENCH_ROWS, rows of 4 KiB that a save holds; BENCH_HANG=1, a rank that loses its peer hangs
instead of ending, and takes no SIGTERM.
"""

import os
import time


def note(what: str, step: int = 0) -> None:
    line = f"{time.time():.6f} {what} {os.environ['RANK']} {step}\n"
    file = os.open(os.environ["BENCH_LOG"], os.O_WRONLY | os.O_APPEND)
    os.write(file, line.encode())
    os.close(file)


if __name__ == "__main__":
    note("start")

    import importlib.util
    import signal
    import sys
    from typing import Any

    spec = importlib.util.spec_from_file_location("standin_rank", "/standin/rank.py")
    assert spec is not None
    assert spec.loader is not None
    standin: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(standin)
    standin.ROWS = int(os.environ.get("BENCH_ROWS", standin.ROWS))

    class Rank(standin.Rank):  # type: ignore[misc]  # a module without a name that a checker could follow
        def save(self, reason: Any) -> None:
            super().save(reason)
            note("committed", self.step)

        def mark(self, control: Any, generation: int, state: Any) -> None:  # type: ignore[override]
            standin.Rank.mark(control, generation, state)
            if state is standin.BufferState.SEALED:
                note("sealed", self.step)

    try:
        Rank().run()
    except (OSError, EOFError):
        if not os.environ.get("BENCH_HANG"):
            raise
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            time.sleep(3600)
    sys.exit(0)
