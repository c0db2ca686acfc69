"""`rtj`: training that resumes, from the command line, without Kubernetes.

Exit codes: 0 finished or nothing wrong, 1 failed, 2 usage or an impossible plan, 69 store unusable or unreachable,
78 resume refused, 143 saved and stopped, stopped, or fenced by another `rtj run`. A preempted exit is never 0.
"""

import argparse
import sys
from collections.abc import Sequence

from trainer_sidecar.commands import checkpoints, export, gc, journal, plan, run, store

EXIT_USAGE = 2
EXIT_STORE = 69
_EPILOG = """exit codes:
  0    finished
  1    failed: the restart budget is used up, the run may not start, a checkpoint is bad, something could not be
       deleted (the message says which and why)
  2    usage, or a plan that is impossible (the message names sizes that work)
  69   the store cannot be used or reached, or a probe refuses it
  78   resume refused: the checkpoint does not fit the script (each difference is named)
  143  saved and stopped, stopped, or fenced by another rtj run of the same run

examples:
  rtj run --nproc 4 --store file:///data/ckpt -- train.py --lr 3e-4
  rtj run --nproc 8 --store s3://bucket/team-a --interval-steps 200 -- -m sft.train
  rtj plan -f job.yaml
  rtj checkpoints list --store file:///data/ckpt --run-id train
  rtj checkpoints verify --deep --store s3://bucket/team-a --namespace ml --run-id sft
  rtj export --format hf --config ./base-model --to ./sft --store s3://bucket/team-a --namespace ml --run-id sft
  rtj gc --dry-run --store s3://bucket/team-a --namespace ml --run-id sft
  rtj store probe --store s3://bucket/team-a --endpoint https://s3.example.com
"""


def build_parser() -> argparse.ArgumentParser:
    """The parser with every subcommand."""
    parser = argparse.ArgumentParser(
        prog="rtj",
        description="Distributed training that resumes: checkpoints as transactions, checked resumes.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    subcommands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in (run, plan, checkpoints, export, journal, gc, store):
        command.add(subcommands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Errors that a user can act on are one line on stderr; everything else is a traceback."""
    from trainer_sidecar.run.local_processes import SidecarDiedError
    from trainer_sidecar.run.local_volume import VolumeError
    from trainer_sidecar.store.base import StoreError
    from trainer_sidecar.store.fence import FenceError
    from trainer_sidecar.store.journal import JournalError
    from trainer_sidecar.store.verify import BadCheckpointError, FormatTooNewError

    args, unknown = build_parser().parse_known_args(argv)
    if unknown:
        where = f"rtj {args.command} {getattr(args, 'action', None) or ''}".strip()
        return _complain(f"unrecognized arguments: {' '.join(unknown)}: see {where} --help", EXIT_USAGE)
    try:
        return int(args.handler(args))
    except StoreError as exc:
        return _complain(f"{exc.reason}: {exc}", EXIT_STORE)
    except FenceError as exc:
        return _complain(f"{exc.reason}: {exc}", 1)
    except (JournalError, SidecarDiedError, VolumeError, BadCheckpointError, FormatTooNewError) as exc:
        return _complain(str(exc), 1)
    except ValueError as exc:
        return _complain(str(exc), EXIT_USAGE)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of a table has seen enough
        return 0


def _complain(message: str, code: int) -> int:
    print(f"rtj: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
