"""`rtj run`: train on this machine with the same sidecar, launcher and journal as in a cluster."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer_sidecar.commands.store_options import add_store_options, positive
from trainer_sidecar.contract.plan import (
    AccumulationSave,
    CheckpointPolicy,
    FingerprintPolicy,
    OnVerificationFailure,
    Retention,
    VerificationPolicy,
)

if TYPE_CHECKING:
    from rtj_operator.api.effective import EffectiveSpec
    from trainer_sidecar.run.local_plan import LocalMesh, RunSettings
    from trainer_sidecar.store.forks import Fork

_DESCRIPTION = """Train on this machine and survive failures: ranks that die are started again from the newest commit,
and the same command run again resumes. Ctrl-C saves and ends; twice stops at once. Options beat the job file."""


def add(subcommands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the subcommand."""
    parser = subcommands.add_parser(
        "run",
        help="train on this machine, resumable",
        description=_DESCRIPTION,
        usage="rtj run [options] -- train.py args...",
    )
    parser.add_argument(
        "script", nargs=argparse.REMAINDER, help="what torchrun runs: a script or -m module, then arguments"
    )
    parser.add_argument(
        "-f", "--file", type=Path, metavar="JOB.YAML", help="take store, mesh, batch and script from a job"
    )
    add_store_options(parser, required=False)
    parser.add_argument(
        "--run-id", metavar="ID", help="name of the run (default: the job's, or the script's)"
    )
    parser.add_argument(
        "--resume-from",
        metavar="RUN[/CHECKPOINT]",
        help="start a new run as a fork of this one in the same store (default: its newest checkpoint)",
    )
    _add_mesh(parser.add_argument_group("mesh and batch"))
    _add_policy(parser.add_argument_group("checkpoints and failures"))
    show = parser.add_argument_group("output")
    show.add_argument(
        "--status-port",
        type=int,
        default=0,
        metavar="PORT",
        help="sidecar's /status and /metrics (0: a free port)",
    )
    show.add_argument(
        "--ledger", type=Path, metavar="DIR", help="every rank writes there what it consumed and saw"
    )
    show.add_argument("--json", action="store_true", help="events as JSON lines on stderr")
    show.add_argument("--verbose", action="store_true", help="logs of launcher and sidecar on stderr too")
    parser.set_defaults(handler=_run)


def _add_mesh(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--nproc", type=positive, metavar="N", help="ranks on this machine (default 1, or the job's)"
    )
    group.add_argument("--tp", type=positive, metavar="N", help="tensor parallel (default 1)")
    group.add_argument("--pp", type=positive, metavar="N", help="pipeline parallel (default 1)")
    group.add_argument("--zero", type=int, choices=(0, 1, 2, 3), help="ZeRO stage (default 3)")
    group.add_argument(
        "--global-batch",
        type=positive,
        metavar="N",
        help="samples per step, kept constant (default: the checkpoint's, else one a replica)",
    )
    group.add_argument(
        "--max-micro-batch",
        type=positive,
        metavar="N",
        help="most samples that a rank takes at once (default: the checkpoint's)",
    )


def _add_policy(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--interval-steps", type=int, metavar="N", help="save every N steps (default 500, 0: off)"
    )
    group.add_argument(
        "--interval-seconds", type=float, metavar="S", help="save every S seconds (default 600, 0: off)"
    )
    group.add_argument(
        "--keep-last", type=int, metavar="N", help="newest checkpoints that stay (default 3, at least 2)"
    )
    group.add_argument(
        "--keep-every-steps",
        type=int,
        metavar="N",
        help="the first checkpoint of every N steps stays as well (default 0: off)",
    )
    group.add_argument(
        "--accumulation-save",
        choices=[mode.value for mode in AccumulationSave],
        help="what a save inside an accumulation window holds (default boundary: none there)",
    )
    group.add_argument(
        "--max-failed-saves",
        type=int,
        metavar="N",
        help="failed saves in a row that end an attempt, the store's outages apart (default 5, 0: off)",
    )
    group.add_argument(
        "--accept",
        action="append",
        default=[],
        metavar="PATTERN",
        help="resume although these fingerprints have changed, as in training.* (may be given again)",
    )
    group.add_argument(
        "--on-verification-failure",
        choices=[choice.value for choice in OnVerificationFailure],
        help="when losses after a resume differ from those before (default FallBack)",
    )
    group.add_argument(
        "--max-restarts",
        type=int,
        default=3,
        metavar="K",
        help="failures in a row without a newer commit (default 3)",
    )
    group.add_argument(
        "--backoff-seconds",
        type=float,
        default=5.0,
        metavar="S",
        help="before the second of those (default 5)",
    )
    group.add_argument(
        "--hang-timeout",
        type=float,
        default=1800.0,
        metavar="S",
        help="seconds without a step (default 1800, 0: off)",
    )
    group.add_argument(
        "--again",
        action="store_true",
        help="start the script although the same command has finished this run before",
    )


def _run(args: argparse.Namespace) -> int:
    from trainer_sidecar.run.local_run import LocalRun
    from trainer_sidecar.run.run_events import RunEvents

    settings = settings_of(args)
    _check_script(settings.script[0])
    events = RunEvents(as_json=args.json)
    events.tell(
        "Run",
        f"run {settings.run_id} in {settings.store_url}: {' '.join(settings.script)}",
        runId=settings.run_id,
        store=settings.store_url,
    )
    return LocalRun(settings, events, verbose=args.verbose).run()


def _check_script(name: str) -> None:
    """A script that is not there is no failure to retry. Raises ValueError."""
    if not name.startswith("-") and not Path(name).is_file():
        raise ValueError(
            f"no script {name} on this machine: name the script itself, without python or torchrun, "
            "as in: rtj run --store file:///ckpt -- train.py"
        )


def settings_of(args: argparse.Namespace) -> "RunSettings":
    """Settings from options, then the job file, then defaults. Raises ValueError naming what is missing."""
    from trainer_sidecar.run.local_plan import RunSettings, default_run_id

    job = _job(args.file)
    script = [w for i, w in enumerate(args.script) if i or w != "--"] or (list(job.command) if job else [])
    if not script:
        raise ValueError(
            "nothing to run: name the script after --, as in: rtj run --store file:///ckpt -- train.py"
        )
    store = args.store or (job.store.url if job else None)
    if not store:
        raise ValueError(
            "no store: give --store file:///folder or s3://bucket/prefix, or a job file with one"
        )
    settings = RunSettings(
        script=script,
        store_url=store,
        run_id=args.run_id or (job.run_id if job else default_run_id(script)),
        mesh=_mesh(args, job),
        store_endpoint=args.endpoint or (job.store.endpoint if job and not args.store else None),
        store_region=args.region or (job.store.region if job and not args.store else None),
        checkpoint=_checkpoint(args, job.checkpoint if job else CheckpointPolicy()),
        verification=_verification(args, job),
        fingerprints=_fingerprints(args, job),
        max_restarts=args.max_restarts,
        backoff_seconds=args.backoff_seconds,
        hang_timeout=args.hang_timeout,
        status_port=args.status_port,
        ledger=args.ledger.absolute() if args.ledger else None,
        fork=_fork(args.resume_from),
        again=args.again,
    )
    settings.keys  # noqa: B018  refuses a run id that cannot be part of a key
    return settings


def _fork(source: str | None) -> "Fork | None":
    """RUN or RUN/CHECKPOINT. Raises ValueError for a name that cannot be part of a key, or is no checkpoint id."""
    if not source:
        return None
    from trainer_sidecar.contract.keys import RunKeys, parse_checkpoint_id
    from trainer_sidecar.run.local_plan import NAMESPACE
    from trainer_sidecar.store.forks import Fork

    run, _, checkpoint = source.partition("/")
    RunKeys(NAMESPACE, run)
    if checkpoint:
        parse_checkpoint_id(checkpoint)
    return Fork(NAMESPACE, run, checkpoint or None)


def _job(path: Path | None) -> "EffectiveSpec | None":
    if path is None:
        return None
    from trainer_sidecar.commands.job_file import read_job

    return read_job(path)


def _mesh(args: argparse.Namespace, job: "EffectiveSpec | None") -> "LocalMesh":
    from trainer_sidecar.run.local_plan import LocalMesh

    known: dict[str, Any] = {}
    if job is not None:
        mesh = job.mesh
        known = {
            "ranks": mesh.nodes * mesh.ranks_per_node,
            "tp": mesh.tp,
            "pp": mesh.pp,
            "zero": mesh.zero,
            "alternatives": mesh.alternatives,
            "global_batch": mesh.global_batch,
            "max_micro_batch": mesh.micro_batch_limit,
            "matrix": job.matrix,
        }
    options = ("tp", "pp", "zero", "global_batch", "max_micro_batch")
    given = {"ranks": args.nproc, **{name: getattr(args, name) for name in options}}
    known.update({name: value for name, value in given.items() if value is not None})
    return LocalMesh(**{"ranks": 1, **known})


def _checkpoint(args: argparse.Namespace, policy: CheckpointPolicy) -> CheckpointPolicy:
    if args.keep_last is not None and args.keep_last < 2:
        raise ValueError(
            f"--keep-last {args.keep_last} is below 2: a bad newest checkpoint would leave nothing"
        )
    kept = {"keep_last": args.keep_last, "keep_every_steps": args.keep_every_steps}
    retention = _given_over((policy.retention or Retention()).model_dump(), kept)
    names = ("interval_steps", "interval_seconds", "accumulation_save", "max_failed_saves")
    given = {name: getattr(args, name) for name in names}
    return CheckpointPolicy(**{**_given_over(policy.model_dump(), given), "retention": retention})


def _verification(args: argparse.Namespace, job: "EffectiveSpec | None") -> VerificationPolicy:
    policy = job.verification if job else VerificationPolicy(on_failure=OnVerificationFailure.FALL_BACK)
    given = {"on_failure": args.on_verification_failure}
    return VerificationPolicy(**_given_over(policy.model_dump(), given))


def _fingerprints(args: argparse.Namespace, job: "EffectiveSpec | None") -> FingerprintPolicy:
    policy = job.fingerprints if job else FingerprintPolicy()
    return policy.model_copy(update={"accept": [*policy.accept, *args.accept]})


def _given_over(known: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    return {**known, **{name: value for name, value in given.items() if value is not None}}
