"""`rtj export`: a committed checkpoint as safetensors, as a Hugging Face model folder, or as a plain DCP folder.

Every byte is proven by the checkpoint's hash leaves on its way. `rtj-export.json` is written last: a folder without it
is not whole.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from trainer_sidecar.commands.found import find_stored, read_run
from trainer_sidecar.commands.progress import Progress, rate_text
from trainer_sidecar.commands.store_options import add_run_options, open_journal, positive
from trainer_sidecar.commands.table import print_rows
from trainer_sidecar.contract.checkpoint import ManifestFile
from trainer_sidecar.contract.journal import RestorePoint
from trainer_sidecar.export.adapters import for_peft
from trainer_sidecar.export.source import Source, Stored
from trainer_sidecar.store.verify import BadCheckpointError

MODEL = "model/"
EXIT_BAD = 1
DONE = "rtj-export.json"
_STEMS = {"safetensors": "tensors", "hf": "model", "dcp": "tensors"}
_EPILOG = """exit codes: 0 done; 1 the checkpoint is bad (file, expected and found are shown); 2 usage;
69 the store cannot be used or reached

examples:
  rtj export --format hf --config ./base-model --to ./sft --store s3://bucket/team-a --namespace ml --run-id sft
  rtj export 000000000400-0000000001-9f3c02aa --format safetensors --all --to ./all --store file:///ckpt --run-id train
"""


def add(subcommands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the subcommand."""
    parser = subcommands.add_parser(
        "export",
        help="write a committed checkpoint as safetensors, Hugging Face model or plain DCP",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "checkpoint",
        nargs="?",
        default="newest",
        help="checkpoint id, or 'newest' (default: what a resume would take)",
    )
    add_run_options(parser)
    parser.add_argument("--format", choices=sorted(_STEMS), default="safetensors")
    parser.add_argument("--to", type=Path, required=True, metavar="FOLDER", help="empty or new folder")
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--all", action="store_true", help="optimizer and other state as well, with its full names"
    )
    what.add_argument("--trainable", action="store_true", help="only what is trained, as adapters")
    parser.add_argument(
        "--strip",
        default="",
        metavar="PREFIX",
        help="take this off the names of the model's tensors, as module. of a wrapper",
    )
    parser.add_argument(
        "--exclude",
        action="append",
        default=[],
        metavar="PATTERN",
        help="leave out tensors of these exported names, as '*.freqs_cis' (may be given again)",
    )
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FOLDER",
        help="with hf: configuration and tokenizer files that are copied from here",
    )
    parser.add_argument(
        "--shard-mb", type=positive, default=5000, metavar="N", help="largest file, in MB of 10^6 bytes"
    )
    parser.add_argument(
        "--parallel", type=positive, default=8, metavar="N", help="reads at once, 8 MiB each (default 8)"
    )
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    parser.set_defaults(handler=_export)


def _export(args: argparse.Namespace) -> int:
    if args.all and args.strip:
        raise ValueError(
            f"--strip {args.strip} and --all exclude each other: with --all every name stays in full; leave one of "
            "them out"
        )
    if args.config is not None and not args.config.is_dir():
        raise ValueError(f"--config {args.config} is no folder")
    if args.to.exists() and (not args.to.is_dir() or any(args.to.iterdir())):
        raise ValueError(f"--to {args.to} is not empty: name a new folder")
    journal = open_journal(args)
    point = find_stored(read_run(journal), args.checkpoint)
    source = Source(journal.store, journal.keys, point)
    try:
        return _from(source, point, args)
    except BadCheckpointError as exc:
        print(
            f"rtj: checkpoint {exc.checkpoint_id}: {exc.file} should be {exc.expected}, found {exc.found}; nothing is "
            "exported. Take one before it (rtj checkpoints list), and record what is wrong with this one "
            "(rtj checkpoints verify --deep --record)",
            file=sys.stderr,
        )
        return EXIT_BAD


def _from(source: Source, point: RestorePoint, args: argparse.Namespace) -> int:
    manifest = source.open()
    if manifest.training_state.folders is not None:
        raise ValueError(
            f"checkpoint {point.checkpoint_id} holds folders that a framework has written, no tensors: nothing can "
            "be exported. Let a script put them into a folder by FolderSession.restore_folder(…, all_ranks=True), and "
            "run the framework's own converter there (docs/own-folder.md)"
        )
    tensors = chosen(
        source.tensors, manifest, everything=args.all, trainable=args.trainable, strip=args.strip
    )
    tensors = without(tensors, args.exclude)
    stem = _STEMS[args.format]
    if args.format == "hf" and (adapters := for_peft(tensors)) is not None:
        tensors, stem = adapters, "adapter_model"
    if args.format == "hf" and args.config is None:
        needed = "adapter_config.json" if stem == "adapter_model" else "config.json"
        print(
            f"rtj: {args.to} gets no {needed}, without which from_pretrained cannot load it: --config FOLDER copies it",
            file=sys.stderr,
        )
    try:
        args.to.mkdir(parents=True, exist_ok=True)
        row = _write(args, source, manifest, tensors, point, stem)
    except OSError as exc:
        raise ValueError(f"--to {args.to} cannot be written: {exc}; what is there is not whole") from exc
    print_rows([row], output=args.output)
    return 0


def chosen(
    tensors: Iterable[Stored], manifest: ManifestFile, *, everything: bool, trainable: bool, strip: str = ""
) -> dict[str, Stored]:
    """Tensors by exported name: the model's without our prefix, or all of them. Raises ValueError for none."""
    if everything:
        return {t.name: t for t in tensors}
    found = {t.name.removeprefix(MODEL): t for t in tensors if t.name.startswith(MODEL)}
    if trainable:
        wanted = set(manifest.training_state.trainable)
        found = {name: t for name, t in found.items() if name in wanted}
    if not found:
        raise ValueError(f"checkpoint {manifest.checkpoint_id} has no such tensors")
    if strip and not any(name.startswith(strip) for name in found):
        raise ValueError(f"--strip {strip}: no tensor's name starts so, the first one is {next(iter(found))}")
    stripped = {name.removeprefix(strip): t for name, t in found.items()}
    if len(stripped) < len(found):
        twice = next(name for name in found if name.startswith(strip) and name.removeprefix(strip) in found)
        raise ValueError(
            f"--strip {strip}: {twice} would have the name of another tensor; export without --strip"
        )
    return stripped


def without(tensors: dict[str, Stored], patterns: Iterable[str]) -> dict[str, Stored]:
    """Tensors whose names meet none of the shell-like patterns. Raises ValueError for one that meets nothing, and for
    patterns that leave nothing."""
    for pattern in patterns:
        left = {name: t for name, t in tensors.items() if not fnmatchcase(name, pattern)}
        if len(left) == len(tensors):
            raise ValueError(
                f"--exclude {pattern}: no tensor has such a name; there is {', '.join(list(tensors)[:3])}"
            )
        if not left:
            raise ValueError(f"--exclude {pattern} leaves no tensor to export")
        tensors = left
    return tensors


def _write(
    args: argparse.Namespace,
    source: Source,
    manifest: ManifestFile,
    tensors: dict[str, Stored],
    point: RestorePoint,
    stem: str,
) -> dict[str, Any]:
    from trainer_sidecar.export import safetensors_file  # numpy, which no other command needs

    shards = safetensors_file.plan(tensors, stem, args.shard_mb * 10**6, raw=args.format == "dcp")
    total = sum(t.bytes for t in tensors.values())
    folder = args.to / "safetensors.partial" if args.format == "dcp" else args.to
    folder.mkdir(exist_ok=True)
    metadata = {"format": "pt", "checkpoint": point.checkpoint_id, "step": str(point.step)}
    with Progress(point.checkpoint_id, total) as progress:
        files = [
            safetensors_file.write(
                source, shard, folder, metadata, parallel=args.parallel, progress=progress.add
            )
            for shard in shards
        ]
        seconds = progress.seconds
    if args.format == "dcp":
        from trainer_sidecar.export import dcp_folder

        dcp_folder.write(files, tensors, args.to)
        shutil.rmtree(folder)
    elif len(shards) > 1:
        index = json.dumps(safetensors_file.index_of(shards), indent=2)
        (folder / f"{stem}.safetensors.index.json").write_text(index)
    if args.config is not None:
        _copy(args.config, args.to)
    facts = {
        "checkpoint": point.checkpoint_id,
        "step": point.step,
        "samples": manifest.progress.samples,
        "format": args.format,
        "tensors": len(tensors),
        "bytes": total,
    }
    told = {**facts, "run": f"{args.namespace}/{args.run_id}", "aliases": manifest.training_state.aliases}
    (args.to / DONE).write_text(json.dumps(told, indent=2) + "\n")
    return {**facts, "seconds": round(seconds, 3), "rate": rate_text(total, seconds), "to": str(args.to)}


def _copy(config: Path, folder: Path) -> None:
    """Small files that describe the model; its old weights stay where they are."""
    for path in sorted(config.iterdir()):
        weights = path.suffix in (".safetensors", ".bin", ".pt", ".pth", ".gguf") or path.name.endswith(
            ".index.json"
        )
        if path.is_file() and not weights:
            shutil.copyfile(path, folder / path.name)
