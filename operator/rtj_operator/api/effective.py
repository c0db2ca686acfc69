"""The spec with every default resolved: what the rest of the operator reads. Pure; the chart's settings come as a
value.

Raises nothing for a spec that `validation` refuses: a value that cannot be resolved takes the least harmful one, and
`validation` has named it. So a status can be written for a broken job too.
"""

from dataclasses import dataclass, field

from rtj_operator.api.checkpoint import ResumeFrom
from rtj_operator.api.job import ResumableTrainingJob
from rtj_operator.api.policies import IntervalPolicy, OnFingerprintChange
from rtj_operator.api.spec import CompatibilityEntry, JobSpec
from rtj_operator.api.template import extended_resources, trainer, words
from rtj_operator.interval import upper_bound
from rtj_operator.mesh import MeshSpec
from trainer_sidecar.contract.plan import (
    CheckpointPolicy,
    FingerprintClass,
    FingerprintPolicy,
    Retention,
    VerificationPolicy,
)


@dataclass(frozen=True)
class OperatorDefaults:
    """What the chart says and a job may leave out, and what the operator allows (O20, O26)."""

    store_endpoint: str | None = None
    store_region: str | None = None
    store_secret: str = "rtj-store"
    """Secret that is used when the job names none; it need not exist."""
    allowed_secrets: frozenset[str] = frozenset({"rtj-store"})
    allowed_url_prefixes: tuple[str, ...] = ()
    """Empty: any."""
    allowed_endpoints: tuple[str, ...] = ()
    """Empty: any. The operator's own endpoint is always allowed."""


@dataclass(frozen=True)
class ResolvedStore:
    """Where the run's objects are, and by which Secret the sidecar gets there."""

    url: str
    endpoint: str | None
    region: str | None
    secret: str
    secret_required: bool
    """True when the job itself names the Secret: a missing one is then an error and not "use the pod's identity"."""


@dataclass(frozen=True)
class EffectiveSpec:
    """A job's spec with all defaults resolved."""

    namespace: str
    name: str
    uid: str
    run_id: str
    suspend: bool
    mesh: MeshSpec
    """nodes, min_nodes, max_nodes, sizes, ranks_per_node, parallelism and batch."""
    matrix: tuple[CompatibilityEntry, ...]
    gpu_resource: str | None
    """Resource of the trainer's limits that ranks per node were taken from; None: ranksPerNode or 1."""
    command: tuple[str, ...]
    """What torchrun runs: the trainer's command and args."""
    store: ResolvedStore
    checkpoint: CheckpointPolicy
    verification: VerificationPolicy
    status_port: int
    resume_from: ResumeFrom | None = None
    """The run, in the same namespace, that this one's first attempt starts from (R15)."""
    fingerprints: FingerprintPolicy = field(default_factory=FingerprintPolicy)

    @property
    def nodes(self) -> int:
        return self.mesh.nodes

    @property
    def ranks_per_node(self) -> int:
        return self.mesh.ranks_per_node


def effective(job: ResumableTrainingJob, defaults: OperatorDefaults) -> EffectiveSpec:
    """All defaults of `job` resolved."""
    spec, meta = job.spec, job.metadata
    container = trainer(spec.template) or {}
    resource, ranks = ranks_per_node(spec)
    return EffectiveSpec(
        namespace=meta.namespace,
        name=meta.name,
        uid=meta.uid,
        run_id=spec.checkpoint.run_id or meta.name,
        suspend=spec.suspend,
        mesh=MeshSpec.of(spec, ranks),
        matrix=tuple(spec.resume_compatibility or ()),
        gpu_resource=resource,
        command=tuple(words(container)),
        store=_store(spec, defaults),
        checkpoint=_checkpoint_policy(spec),
        verification=VerificationPolicy(
            steps=spec.verification.steps,
            loss_tolerance=float(spec.verification.loss_tolerance),
            on_failure=spec.verification.on_failure,
        ),
        status_port=spec.status_port,
        resume_from=spec.checkpoint.resume_from,
        fingerprints=_fingerprints(spec),
    )


def ranks_per_node(spec: JobSpec) -> tuple[str | None, int]:
    """(GPU resource, ranks per node): what the spec says, else the trainer's only extended resource, else (None, 1)."""
    limits = extended_resources(trainer(spec.template) or {})
    named = spec.gpu_resource or (next(iter(limits)) if len(limits) == 1 else None)
    if spec.ranks_per_node is not None:
        return named, spec.ranks_per_node
    return named, max(1, limits.get(named, 1)) if named else 1


def _store(spec: JobSpec, defaults: OperatorDefaults) -> ResolvedStore:
    store = spec.checkpoint.store
    return ResolvedStore(
        url=store.url.rstrip("/"),
        endpoint=store.endpoint or defaults.store_endpoint,
        region=store.region or defaults.store_region,
        secret=store.credentials_secret or defaults.store_secret,
        secret_required=store.credentials_secret is not None,
    )


def _fingerprints(spec: JobSpec) -> FingerprintPolicy:
    """Consent makes a change one that needs it and has it: it is shown, and not taken for harmless."""
    classes = {OnFingerprintChange.REFUSE: FingerprintClass.REFUSED}
    rules = spec.fingerprint_rules or []
    first: dict[str, OnFingerprintChange] = {}
    for rule in rules:
        first.setdefault(rule.field, rule.on_change)
    return FingerprintPolicy(
        declared=dict(spec.fingerprints or {}),
        classes={name: classes.get(said, FingerprintClass.CONSENT) for name, said in first.items()},
        accept=[name for name, said in first.items() if said is OnFingerprintChange.ACCEPT],
    )


def _checkpoint_policy(spec: JobSpec) -> CheckpointPolicy:
    checkpoint = spec.checkpoint
    chosen = checkpoint.interval_policy is IntervalPolicy.AUTO
    return CheckpointPolicy(
        interval_steps=0 if chosen else checkpoint.interval_steps,
        interval_seconds=upper_bound(checkpoint.interval_seconds) if chosen else checkpoint.interval_seconds,
        when_busy=checkpoint.when_busy,
        save_timeout_seconds=checkpoint.save_timeout_seconds,
        upload_bytes_per_second=checkpoint.upload_bytes_per_second,
        accumulation_save=checkpoint.accumulation_save,
        max_failed_saves=checkpoint.max_failed_saves,
        retention=Retention(
            keep_last=checkpoint.retention.keep_last,
            keep_every_steps=checkpoint.retention.keep_every_steps or 0,
        ),
    )
