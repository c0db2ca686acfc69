"""What a reason calls for from a person, and what an order to save leads to: tables that `explain` reads."""

from rtj_operator.conditions import Reason

ORDERS: dict[str, str] = {
    "Suspended": "the job is Suspended and holds nothing.",
    "Resized": "a placement of the size that spec.nodes asks for goes on from that save.",
    "Growing": "a larger placement goes on from that save.",
    "SpecChanged": "a placement made from the new spec goes on from that save.",
    Reason.DEADLINE_EXCEEDED.value: "the job is Failed: spec.activeDeadlineSeconds have passed.",
}
"""By `status.attempt.orderReason`."""

_EDIT = "kubectl edit rtj {name}"
_LOGS = "rtj logs {name}"
_MESSAGES = "rtj attempts {name} --messages"
_CHECKPOINTS = "rtj checkpoints list --job {name}"

ADVICE: dict[str, tuple[str, ...]] = {
    Reason.TOO_MANY_FAILURES: (
        _LOGS,
        _MESSAGES,
        "rtj rollback {name} CHECKPOINT, if the state itself went bad",
    ),
    Reason.RANK_FAILED: (_LOGS, _MESSAGES),
    Reason.BACKING_OFF: (_LOGS, _MESSAGES),
    Reason.OOM_KILLED: (_LOGS, f"{_EDIT}: more memory, or a smaller batch.maxMicroBatchSize"),
    Reason.HUNG: (f"{_LOGS}: the ranks' stacks are there",),
    Reason.RESUME_REFUSED: (
        f"{_EDIT}: undo the change that is named, or accept it in spec.fingerprintRules",
        "rtj rollback {name} CHECKPOINT, to start from another one",
    ),
    Reason.RESTORE_POINT_BAD: (_CHECKPOINTS, "rtj checkpoints verify --deep --job {name}"),
    Reason.NOTHING_RESTORABLE: (
        _CHECKPOINTS,
        "rtj checkpoints reinstate CHECKPOINT --job {name} --by NAME --reason TEXT, if one is good",
    ),
    Reason.RUN_EXISTS: (
        f"{_EDIT}: checkpoint.adopt: true takes the run over, checkpoint.resumeFrom starts a fork of it",
    ),
    Reason.RUN_TAKEN_OVER: ("kubectl delete rtj {name}: another object goes on with the run",),
    Reason.UNSCHEDULABLE: (
        "kubectl describe nodes, to see what is free",
        "kubectl scale rtj/{name} --replicas=N, to ask for fewer nodes",
    ),
    Reason.SCHEDULING_GATED: (
        f"{_EDIT}: take schedulingGates out of the template that no controller takes off",
    ),
    Reason.IMAGE_PULL_FAILED: (f"{_EDIT}: name and pull secret of the image",),
    Reason.CONTAINER_START_FAILED: (f"{_EDIT}: the command, Secrets and mounts that are named",),
    Reason.POD_REFUSED: (f"{_EDIT}: what the refusal names",),
    Reason.WEBHOOK_FAILING: (
        "kubectl get mutatingwebhookconfigurations,validatingwebhookconfigurations, and whether the pods behind the "
        "one that is named run",
    ),
    Reason.API_SERVER_FAILING: ("kubectl get --raw /readyz?verbose",),
    Reason.OPERATOR_FAILING: (
        "kubectl logs -n NAMESPACE deploy/OPERATOR, and report the traceback of this job that is there",
    ),
    Reason.QUOTA_EXCEEDED: ("kubectl describe quota", "kubectl scale rtj/{name} --replicas=N"),
    Reason.STORE_UNAVAILABLE: ("rtj store probe --store URL, from a machine that should reach it",),
    Reason.STORE_ACCESS_DENIED: (
        "look at the Secret of spec.checkpoint.store (rtj-store unless it names one), and at the bucket's policy",
    ),
    Reason.JOURNAL_LOST: ("rtj journal tail --job {name}, and whether bucket and prefix are the right ones",),
    Reason.TRANSITION_BLOCKED: ("rtj plan -f JOB.YAML, and spec.resumeCompatibility",),
    Reason.DEADLINE_EXCEEDED: (f"{_EDIT}: a longer activeDeadlineSeconds lets it go on",),
    Reason.QUEUED: (
        "kubectl get workloads, to see the queue's reasons",
        "kubectl get workloadpriorityclasses, when there is no Workload of this job: Kueue makes none of a Job whose "
        "class does not exist",
    ),
}
"""By `status.reason`: commands or edits that help, with the job's name to be filled in."""
