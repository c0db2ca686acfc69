"""What is wrong with a spec and CEL cannot say: found by the operator, shown as `Valid=False` with every sentence.

An ordered list of small named checks over one value; each sentence names object, value, limit and next step. Pure.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from rtj_operator.api.base import dig, unknown_fields
from rtj_operator.api.effective import EffectiveSpec, OperatorDefaults, effective
from rtj_operator.api.job import ResumableTrainingJob
from rtj_operator.api.names import GROUP, RESERVED_PREFIX, SIDECAR_CONTAINER, TRAINER_CONTAINER
from rtj_operator.api.quantity import parse_quantity
from rtj_operator.api.template import containers, extended_resources, trainer, words
from rtj_operator.conditions import Reason
from rtj_operator.mesh import Refusal, RefusalReason, plan_size
from trainer_sidecar.contract import CONTRACT_VERSION

PROCESS_STARTERS = frozenset(
    {
        "python",
        "torchrun",
        "sh",
        "bash",
        "dash",
        "zsh",
        "ash",
        "env",
        "exec",
        "accelerate",
        "deepspeed",
        "mpirun",
    }
)
"""First words of a command that start processes by themselves; `rtj-launch` and torchrun do that here."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a spec."""

    reason: Reason
    sentence: str


@dataclass(frozen=True)
class _Case:
    """What the checks look at."""

    job: ResumableTrainingJob
    spec: EffectiveSpec
    defaults: OperatorDefaults


def validate(job: ResumableTrainingJob, defaults: OperatorDefaults) -> list[Problem]:
    """Everything that is wrong with the spec, in the order in which a person would want to hear it. Empty: it can
    run."""
    case = _Case(job, effective(job, defaults), defaults)
    return [problem for check in _CHECKS for problem in check(case)]


def _fields(case: _Case) -> Iterator[Problem]:
    for path in unknown_fields(case.job.spec, "spec"):
        yield Problem(
            Reason.UNKNOWN_FIELD,
            f"{path} is not known to this operator and would be ignored: correct its name, or upgrade the operator",
        )


def _drill(case: _Case) -> Iterator[Problem]:
    """A drill restores on exactly so many nodes, which need a mesh; they need not be a size of the job's own."""
    asked, mesh = case.job.spec.drill, case.spec.mesh
    if asked is None or not asked.deep:
        return
    size = asked.nodes or mesh.min_nodes
    found = plan_size(replace(mesh, nodes=size, min_nodes=size, max_nodes=size, sizes=()), size)
    if isinstance(found, Refusal):
        sentence = found.sentence.partition("; ")[0]
        yield Problem(
            Reason.SIZES_INVALID, f"spec.drill.nodes {size}: {sentence}: choose another number of nodes"
        )


def _trainer(case: _Case) -> Iterator[Problem]:
    container = trainer(case.job.spec.template)
    if container is None:
        yield Problem(
            Reason.TRAINER_MISSING,
            f"spec.template holds no container named {TRAINER_CONTAINER}: name the one that trains so",
        )
    elif not container.get("command"):
        yield Problem(
            Reason.COMMAND_MISSING,
            f"container {TRAINER_CONTAINER} has no command, and that of the image cannot be known: write what "
            f"torchrun "
            'shall run, as in command: [train.py] or command: ["-m", "pkg.train"]',
        )
    elif not isinstance(container["command"], list):
        yield Problem(
            Reason.COMMAND_MISSING,
            f"the command of container {TRAINER_CONTAINER} is {str(container['command'])[:128]!r} and no list: write "
            'each word as an item, as in command: [train.py, --lr, "1e-4"]',
        )
    elif words(container)[0].strip() == "":
        yield Problem(
            Reason.COMMAND_MISSING,
            f"the first word of {TRAINER_CONTAINER}'s command is empty: write the script's name",
        )


def _quantities(case: _Case) -> Iterator[Problem]:
    """Amounts are added up before the API server sees them, so they must be numbers here already."""
    template = case.job.spec.template
    for field in ("containers", "initContainers"):
        for container in containers(template, field):
            for kind in ("limits", "requests"):
                yield from _amounts(container, f"{container.get('name')}: resources.{kind}", kind)


def _amounts(container: Mapping[str, object], place: str, kind: str) -> Iterator[Problem]:
    amounts = dig(container, "resources", kind)
    for name, amount in amounts.items() if isinstance(amounts, Mapping) else ():
        try:
            parse_quantity(amount)
        except ValueError as exc:
            yield Problem(Reason.TEMPLATE_REFUSED, f"container {place}.{name}: {exc}")


def _first_word(case: _Case) -> Iterator[Problem]:
    container = trainer(case.job.spec.template) or {}
    command = container.get("command")
    if not isinstance(command, list) or not command:
        return
    first = str(command[0])
    program = first.rsplit("/", 1)[-1].rstrip("0123456789.")
    if program in PROCESS_STARTERS:
        yield Problem(
            Reason.COMMAND_STARTS_PROCESS,
            f"the command of container {TRAINER_CONTAINER} begins with {first!r}, but torchrun starts the script "
            f"itself, "
            f"on every rank: write {_without_starter(words(container))}",
        )


def _without_starter(command: list[str]) -> str:
    """How the command should read: from the first word that looks like a script or module on."""
    rest = command[1:]
    start = next((i for i, word in enumerate(rest) if word == "-m" or _is_script(word)), None)
    shown = rest[start:] if start is not None else ["train.py"]
    return f"command: [{', '.join(shown)}]"


def _is_script(word: str) -> bool:
    return word.endswith(".py") and not any(c.isspace() for c in word)


def _gpus(case: _Case) -> Iterator[Problem]:
    spec = case.job.spec
    limits = extended_resources(trainer(spec.template) or {})
    if spec.gpu_resource is not None and spec.gpu_resource not in limits:
        yield Problem(
            Reason.GPU_RESOURCE_AMBIGUOUS,
            f"spec.gpuResource {spec.gpu_resource} is not in the limits of container {TRAINER_CONTAINER}, which "
            f"names "
            f"{', '.join(limits) or 'no extended resource'}: add it there, or leave gpuResource out",
        )
    elif spec.gpu_resource is None and spec.ranks_per_node is None and len(limits) > 1:
        yield Problem(
            Reason.GPU_RESOURCE_AMBIGUOUS,
            f"the limits of container {TRAINER_CONTAINER} name several extended resources ({', '.join(limits)}): "
            f"say which "
            "one counts ranks with spec.gpuResource, or set spec.ranksPerNode",
        )


def _sizes(case: _Case) -> Iterator[Problem]:
    mesh = case.spec.mesh
    if not mesh.min_nodes <= mesh.nodes <= mesh.max_nodes:
        yield Problem(
            Reason.SIZES_INVALID,
            f"spec.nodes {mesh.nodes} is not between elastic.minNodes {mesh.min_nodes} and elastic.maxNodes "
            f"{mesh.max_nodes}: change one of them",
        )
    elif mesh.sizes and (wrong := [n for n in mesh.sizes if not mesh.min_nodes <= n <= mesh.max_nodes]):
        yield Problem(
            Reason.SIZES_INVALID,
            f"elastic.sizes {wrong} are not between elastic.minNodes {mesh.min_nodes} and elastic.maxNodes "
            f"{mesh.max_nodes}: take them out, or widen the range",
        )


def _mesh(case: _Case) -> Iterator[Problem]:
    """`nodes` and every listed size must have a plan; sizes of a mere range that have none are just not used."""
    mesh = case.spec.mesh
    for size in sorted({mesh.nodes, *mesh.sizes} & set(mesh.allowed_sizes)):
        found = plan_size(mesh, size)
        if isinstance(found, Refusal):
            reason = (
                Reason.BATCH_NOT_DIVISIBLE
                if found.reason == RefusalReason.BATCH_NOT_DIVISIBLE
                else Reason.MESH_IMPOSSIBLE
            )
            yield Problem(reason, f"{found.sentence}: change batch.globalBatchSize, parallelism or the sizes")


def _processes(case: _Case) -> Iterator[Problem]:
    for field in ("shareProcessNamespace", "hostPID"):
        if dig(case.job.spec.template, "spec", field) is not True:
            continue
        yield Problem(
            Reason.SHARED_PROCESS_NAMESPACE,
            f"spec.template.spec.{field} true would show the sidecar's store credentials to the "
            "trainer: "
            "leave it out",
        )


def _reserved(case: _Case) -> Iterator[Problem]:
    template = case.job.spec.template
    named = [
        (f"spec.template.spec.{field}", str(item.get("name")))
        for field in ("containers", "initContainers", "volumes")
        for item in containers(template, field)
    ]
    for place, name in named:
        if name.startswith(RESERVED_PREFIX):
            yield Problem(
                Reason.RESERVED_NAME,
                f"{place} holds {name!r}, but names with {RESERVED_PREFIX!r} are the operator's own: choose another "
                f"name",
            )
    annotations = dig(template, "metadata", "annotations")
    for key in annotations if isinstance(annotations, Mapping) else ():
        if str(key).partition("/")[0] == GROUP:
            yield Problem(
                Reason.RESERVED_NAME,
                f"spec.template.metadata.annotations holds {key!r}: the operator writes the pods' plans there, and "
                "launchers would obey this one: take it out",
            )
    for container in containers(template):
        ports = container.get("ports")
        taken = (
            [p for p in ports if dig(p, "containerPort") == case.spec.status_port]
            if isinstance(ports, list)
            else []
        )
        if taken:
            yield Problem(
                Reason.RESERVED_NAME,
                f"container {container.get('name')} uses port {case.spec.status_port}, which {SIDECAR_CONTAINER} "
                f"listens "
                "on: set spec.statusPort to another one",
            )


def _restart_policy(case: _Case) -> Iterator[Problem]:
    policy = dig(case.job.spec.template, "spec", "restartPolicy")
    if policy not in (None, "Never"):
        yield Problem(
            Reason.NOT_SUPPORTED,
            f"spec.template.spec.restartPolicy {policy} would restart a trainer behind the operator's back: leave "
            f"it out "
            "(Never is used, and rtj-launch restarts ranks in place)",
        )


def _store(case: _Case) -> Iterator[Problem]:
    store, defaults = case.spec.store, case.defaults
    if store.secret_required and store.secret not in defaults.allowed_secrets:
        allowed = ", ".join(sorted(defaults.allowed_secrets)) or "none"
        yield Problem(
            Reason.SECRET_NOT_ALLOWED,
            f"checkpoint.store.credentialsSecret {store.secret!r} is not allowed by this operator (allowed: "
            f"{allowed}): "
            "use an allowed name, or have it added to the chart's value store.allowedSecrets",
        )
    if {".", ".."} & set(store.url.split("/")):
        yield Problem(
            Reason.STORE_NOT_ALLOWED,
            f"checkpoint.store.url {store.url} has a segment '.' or '..', which a proxy may resolve to somewhere else: "
            "write the prefix itself",
        )
    if defaults.allowed_url_prefixes and not any(_below(store.url, p) for p in defaults.allowed_url_prefixes):
        yield Problem(
            Reason.STORE_NOT_ALLOWED,
            f"checkpoint.store.url {store.url} is below none of the prefixes that this operator allows "
            f"({', '.join(defaults.allowed_url_prefixes)}): use one of them",
        )
    own = defaults.store_endpoint
    if defaults.allowed_endpoints and store.endpoint not in (None, own, *defaults.allowed_endpoints):
        yield Problem(
            Reason.STORE_NOT_ALLOWED,
            f"checkpoint.store.endpoint {store.endpoint} is none of those that this operator allows "
            f"({', '.join(defaults.allowed_endpoints)}): leave it out or use one of them",
        )


def _below(url: str, prefix: str) -> bool:
    return url == prefix.rstrip("/") or url.startswith(prefix.rstrip("/") + "/")


def _contract(case: _Case) -> Iterator[Problem]:
    wanted = case.job.spec.contract_version
    if wanted is not None and wanted != CONTRACT_VERSION:
        yield Problem(
            Reason.CONTRACT_MISMATCH,
            f"spec.contractVersion {wanted} is not {CONTRACT_VERSION}, which this operator speaks: use an image "
            f"with the "
            "library of that contract, or another version of the operator",
        )


_CHECKS: tuple[Callable[[_Case], Iterator[Problem]], ...] = (
    _fields,
    _trainer,
    _quantities,
    _first_word,
    _gpus,
    _sizes,
    _mesh,
    _processes,
    _reserved,
    _restart_policy,
    _store,
    _contract,
    _drill,
)
