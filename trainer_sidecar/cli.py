"""`rtj`: training that resumes, from the command line: without Kubernetes, and as `kubectl rtj` with it.

Exit codes: 0 finished or nothing wrong, 1 failed, 2 usage or an impossible plan, 69 store or cluster unusable or
unreachable, 78 resume refused, 143 saved and stopped, stopped, or fenced by another `rtj run`. A preempted exit is
never 0.
"""

import argparse
import errno
import os
import sys
from collections.abc import Sequence
from contextlib import suppress

from trainer_sidecar import __version__
from trainer_sidecar.commands import checkpoints, export, gc, import_weights, journal, plan, run, store
from trainer_sidecar.commands.store_options import check_run_options
from trainer_sidecar.kube_commands import (
    attempts,
    completion,
    drill,
    logs,
    pin,
    report,
    rollback,
    status,
    suspend,
    why,
)
from trainer_sidecar.kube_commands.cluster import ClusterError
from trainer_sidecar.kube_commands.job_store import CREDENTIALS, fill_in

EXIT_USAGE = 2
EXIT_STORE = 69
EXIT_INTERRUPTED = 130
_EPILOG = """exit codes:
  0    finished
  1    failed: the restart budget is used up, the run may not start, a checkpoint is bad, something could not be
       deleted (the message says which and why)
  2    usage, or a plan that is impossible (the message names sizes that work)
  69   the store or the cluster cannot be used or reached, or a probe refuses it
  78   resume refused: the checkpoint does not fit the script (each difference is named)
  143  saved and stopped, stopped, or fenced by another rtj run of the same run

examples:
  rtj run --nproc 4 --store file:///data/ckpt -- train.py --lr 3e-4
  rtj run --nproc 8 --store s3://bucket/team-a --interval-steps 200 -- -m sft.train
  rtj plan -f job.yaml
  rtj checkpoints list --store file:///data/ckpt --run-id train
  rtj checkpoints verify --deep --store s3://bucket/team-a --namespace ml --run-id sft
  rtj export --format hf --config ./base-model --to ./sft --store s3://bucket/team-a --namespace ml --run-id sft
  rtj import ./base-model --store s3://bucket/team-a --namespace ml --run-id base
  rtj gc --dry-run --store s3://bucket/team-a --namespace ml --run-id sft
  rtj store probe --store s3://bucket/team-a --endpoint https://s3.example.com

in a cluster (also as kubectl rtj):
  rtj status -n ml
  rtj why sft
  rtj logs sft
  rtj report sft --to sft.html
  rtj checkpoints list --job sft
  rtj rollback sft 000000000400-0000000003-1f2e3d4c --reason "loss went up"
  rtj drill faults --all -f job.yaml
"""
_COMMANDS = (run, plan, checkpoints, export, import_weights, journal, gc, store)
_CLUSTER_COMMANDS = (status, attempts, why, logs, suspend, pin, rollback, report, drill, completion)


def build_parser(prog: str = "rtj") -> argparse.ArgumentParser:
    """The parser with every subcommand."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Distributed training that resumes: checkpoints as transactions, checked resumes.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"rtj {__version__}")
    subcommands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in (*_COMMANDS, *_CLUSTER_COMMANDS):
        command.add(subcommands)
    return parser


def kubectl_main() -> int:
    """Entry point of kubectl's plugin `kubectl-rtj`: the same command under another name."""
    return main(prog="kubectl rtj")


def kubectl_complete() -> int:
    """Entry point of `kubectl_complete-rtj`, which kubectl asks for completions of its plugin."""
    return completion.answer(build_parser(), sys.argv[1:], for_kubectl=True)


def main(argv: Sequence[str] | None = None, *, prog: str = "rtj") -> int:
    """Entry point. Errors that a user can act on are one line on stderr; everything else is a traceback."""
    from trainer_sidecar.run.local_processes import SidecarDiedError
    from trainer_sidecar.run.local_volume import VolumeError
    from trainer_sidecar.store.base import StoreError
    from trainer_sidecar.store.fence import FenceError
    from trainer_sidecar.store.journal import JournalError
    from trainer_sidecar.store.verify import BadCheckpointError, FormatTooNewError

    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == [completion.ASK]:
        return completion.answer(build_parser(), words[1:])
    args, unknown = build_parser(prog).parse_known_args(words)
    if unknown:
        where = f"rtj {args.command} {getattr(args, 'action', None) or ''}".strip()
        return _complain(f"unrecognized arguments: {' '.join(unknown)}: see {where} --help", EXIT_USAGE)
    try:
        _name_the_run(args)
        code = int(args.handler(args))
        sys.stdout.flush()
        return code
    except ClusterError as exc:
        return _complain(str(exc), exc.exit_code)
    except StoreError as exc:
        hint = f"; {CREDENTIALS}" if getattr(args, "job_name", None) else ""
        return _complain(f"{exc.reason}: {exc}{hint}", EXIT_STORE)
    except FenceError as exc:
        return _complain(f"{exc.reason}: {exc}", 1)
    except (JournalError, SidecarDiedError, VolumeError, BadCheckpointError, FormatTooNewError) as exc:
        return _complain(str(exc), 1)
    except ValueError as exc:
        return _complain(str(exc), EXIT_USAGE)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _drop_output()  # the reader of a table has seen enough
        return 0
    except OSError as exc:
        if exc.errno not in (errno.ENOSPC, errno.EIO, errno.EDQUOT):
            raise
        if exc.filename is None:
            _drop_output()
        return _complain(f"{exc.filename or 'the output'} cannot be written: {exc.strerror}", 1)


def _name_the_run(args: argparse.Namespace) -> None:
    """For commands that read a run: which one, from options or from the cluster's job."""
    if not hasattr(args, "job_name"):
        return
    if args.job_name is None:
        check_run_options(args)
    else:
        fill_in(args)


def _drop_output() -> None:
    """What is still buffered has nowhere to go, and would fail once more when the interpreter ends."""
    with suppress(OSError, ValueError):  # a stdout that is no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _complain(message: str, code: int) -> int:
    print(f"rtj: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
