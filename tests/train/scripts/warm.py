"""One process that has imported torch once and forks the ranks of attempt after attempt, as it is told on stdin.

What torch imports late (its compiler, at the first optimizer) costs a rank two seconds of CPU: it is imported here too.
A request is a line of JSON: `ranks`, `script`, `env`, `log`, `imports` (modules to have before the fork); the answer is
a line with the exit codes by rank. Real processes and real gloo; when one ends badly, the others are killed at once.
"""

import ctypes
import importlib
import json
import os
import runpy
import signal
import sys
import traceback

import numpy.random  # noqa: F401
import torch
import torch._dynamo
import torch.distributed.fsdp
import torch.distributed.tensor.parallel

import trainer_sidecar.train  # noqa: F401


def rank(number: int, request: dict) -> None:
    code = 1
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no rank outlives its test
    try:
        fd = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(fd, 1), os.dup2(fd, 2)
        os.environ.update(request["env"])
        os.environ.update(RANK=str(number), LOCAL_RANK=str(number), WORLD_SIZE=str(request["ranks"]))
        runpy.run_path(request["script"], run_name="__main__")
        code = 0
    except SystemExit as error:
        code = int(error.code or 0)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(code)


def attempt(request: dict) -> list[int]:
    """Exit codes by rank, negative for a signal."""
    for name in request.get("imports", []):
        importlib.import_module(name)
    ranks = {}
    for number in range(request["ranks"]):
        pid = os.fork()
        if pid == 0:
            rank(number, request)
        ranks[pid] = number
    codes = [0] * len(ranks)
    while ranks:
        pid, status = os.wait()
        codes[ranks.pop(pid)] = code = os.waitstatus_to_exitcode(status)
        for other in ranks if code else ():
            os.kill(other, signal.SIGKILL)
    return codes


def main() -> None:
    torch.set_num_threads(1)
    told = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what an import prints is no answer
    for line in sys.stdin:
        told.write(json.dumps(attempt(json.loads(line))) + "\n")


main()
