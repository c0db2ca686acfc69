"""A job's spec, read once: parsed, validated, and turned into what the decision and the placements need of it."""

from dataclasses import dataclass

from rtj_operator.api import ResumableTrainingJob, parse_job
from rtj_operator.api.base import dig
from rtj_operator.api.effective import EffectiveSpec, OperatorDefaults, effective
from rtj_operator.api.validation import validate
from rtj_operator.conditions import Reason
from rtj_operator.decide import Wanted
from rtj_operator.kube import Object
from rtj_operator.mesh import workable_sizes
from rtj_operator.pods import Placement, PodSettings, build_job, grace_seconds, selector, spec_digest


@dataclass(frozen=True)
class Prepared:
    """`wanted` and `template` (the pods') are None when the spec cannot run; `problems` says why."""

    job: ResumableTrainingJob
    spec: EffectiveSpec
    problems: tuple[str, ...]
    template: Object | None
    wanted: Wanted | None


def prepare(
    raw: Object, defaults: OperatorDefaults, settings: PodSettings, *, placing: bool = True
) -> Prepared:
    """All of it but what the API server may have against a placement. Raises InvalidJobError.

    `placing`: pods may be made of it; without, the template is not looked at.
    """
    job = parse_job(raw)
    spec = effective(job, defaults)
    problems = tuple(f"{p.reason}: {p.sentence}" for p in validate(job, defaults))
    template: Object | None = None
    if placing and not problems:
        template, problems = _template(job, spec, settings)
    return Prepared(job, spec, problems, template, None if problems else wanted_of(job, spec))


def _template(
    job: ResumableTrainingJob, spec: EffectiveSpec, settings: PodSettings
) -> tuple[Object | None, tuple[str, ...]]:
    """The pod template of a placement, for counting how many of it fit; or why none can be made of the user's.

    The schema keeps whatever a template holds (O15): a list where pods have a mapping comes as far as here.
    """
    try:
        build_job(job, spec, Placement(1, spec.nodes, avoid_nodes=("any",)), settings)
        made: Object = build_job(job, spec, Placement(1, spec.nodes), settings)["spec"]["template"]
    except (ValueError, TypeError, AttributeError) as exc:
        text = f"spec.template cannot be made into pods, a part of it has the wrong shape: {exc}"
        return None, (f"{Reason.TEMPLATE_REFUSED}: {text}; see kubectl explain pod.spec",)
    return made, ()


def wanted_of(job: ResumableTrainingJob, spec: EffectiveSpec) -> Wanted:
    """What the spec asks for, as the decision reads it."""
    elastic = job.spec.elastic
    grace = dig(job.spec.template, "spec", "terminationGracePeriodSeconds")
    own_grace = isinstance(grace, int) and not isinstance(grace, bool) and grace >= 0
    return Wanted(
        nodes=spec.nodes,
        min_nodes=spec.mesh.min_nodes,
        sizes=workable_sizes(spec.mesh),
        elastic=elastic is not None,
        spec_hash=spec_digest(job),
        selector=selector(job),
        scale_down_delay=elastic.scale_down_delay_seconds if elastic else 0.0,
        scale_up_delay=elastic.scale_up_delay_seconds if elastic else 0.0,
        cooldown=elastic.cooldown_seconds if elastic else 0.0,
        exit_grace=float(grace if own_grace else grace_seconds(job.status.save_seconds)),
        own_grace=own_grace,
    )
