"""`forked.py N script`: N ranks of a script, forked from one process that has imported torch once.

Real processes, real gloo, but seconds instead of a minute on busy cores. Exits with the first bad code; ranks that are
left when one ends badly are killed, as torchrun does.
"""

import os
import runpy
import signal
import sys


def rank(number: int, world: int, script: str) -> None:
    os.environ.update(RANK=str(number), LOCAL_RANK=str(number), WORLD_SIZE=str(world))
    code = 1
    try:
        runpy.run_path(script, run_name="__main__")
        code = 0
    except SystemExit as error:
        code = int(error.code or 0)
    except BaseException:
        import traceback

        traceback.print_exc()
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    world, script = int(sys.argv[1]), sys.argv[2]
    import torch._dynamo  # else each rank imports it at its first optimizer, two seconds of CPU
    import torch.distributed.fsdp  # noqa: F401

    import trainer_sidecar.train  # noqa: F401

    children = {}
    for number in range(world):
        pid = os.fork()
        if pid == 0:
            rank(number, world, script)
        children[pid] = number
    worst = 0
    while children:
        pid, status = os.wait()
        children.pop(pid, None)
        code = os.waitstatus_to_exitcode(status)
        if code and not worst:
            worst = code
            for other in children:
                os.kill(other, signal.SIGKILL)
    sys.exit(1 if worst else 0)


main()
