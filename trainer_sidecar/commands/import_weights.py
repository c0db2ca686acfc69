"""`rtj import`: weights from elsewhere as the first checkpoint of a run, for jobs to begin with (resumeFrom).

A model folder of Hugging Face (safetensors) or a folder of torch.distributed.checkpoint. Files are stored byte for
byte, read back and proven before the commit. A job that starts from it takes the weights; optimizer, schedule, random
numbers and data begin anew, and its resume report says so.
"""

import argparse
from pathlib import Path

from trainer_sidecar.commands.found import writer
from trainer_sidecar.commands.progress import Progress, rate_text
from trainer_sidecar.commands.store_options import add_store_options, positive
from trainer_sidecar.commands.table import print_rows
from trainer_sidecar.contract.keys import RunKeys

_EPILOG = """exit codes: 0 done; 1 other bytes were read back than were stored; 2 usage, or no whole model (the message
names file or tensor); 69 the store cannot be used or reached

examples:
  rtj import ./llama --store s3://bucket/team-a --namespace ml --run-id llama-base
  rtj import ./dcp/step-4000 --strip model. --store file:///data/checkpoints --run-id base
"""


def add(subcommands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the subcommand."""
    parser = subcommands.add_parser(
        "import",
        help="make a run of weights from elsewhere, for jobs to start from",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where the weights lie")
    add_store_options(parser, required=True)
    parser.add_argument(
        "-n",
        "--namespace",
        default="local",
        metavar="NAME",
        help="that of the jobs (default: local, as rtj run)",
    )
    parser.add_argument("--run-id", required=True, metavar="ID", help="name of the new run")
    parser.add_argument(
        "--format", choices=("auto", "hf", "dcp"), default="auto", help="default: by what is there"
    )
    parser.add_argument(
        "--strip",
        default="",
        metavar="PREFIX",
        help="take only what is named so, without the prefix: model. of a folder that holds an optimizer, too",
    )
    parser.add_argument("--parallel", type=positive, default=4, metavar="N", help="files at once (default 4)")
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    parser.set_defaults(handler=_import)


def _import(args: argparse.Namespace) -> int:
    from trainer_sidecar.importing.read import read
    from trainer_sidecar.store.journal import Journal
    from trainer_sidecar.store.open import open_store

    keys = RunKeys(args.namespace, args.run_id)
    source = read(args.folder, args.format).below(args.strip)
    total = sum(file.path.stat().st_size for file in source.files)
    store = open_store(args.store, endpoint=args.endpoint, region=args.region)
    from trainer_sidecar.importing.run import Import  # torch, once everything else is right

    with Progress(args.run_id, 2 * total) as progress:
        entry, manifest = Import(
            journal=Journal(store, keys),
            source=source,
            origin=str(args.folder),
            writer=writer(),
            parallel=args.parallel,
            progress=progress.add,
        ).run()
        seconds = progress.seconds
    row = {
        "checkpoint": entry.checkpoint_id,
        "format": source.format,
        "files": len(source.files),
        "tensors": len(source.names),
        "bytes": manifest.bytes,
        "seconds": round(seconds, 3),
        "rate": rate_text(total, seconds),
        "run": f"{args.namespace}/{args.run_id}",
    }
    print_rows([row], output=args.output)
    return 0
