"""`spec.checkpoint`: where restore points go, when they are made, how long they stay."""

from pydantic import ConfigDict, Field

from rtj_operator.api.base import MOST_BYTES, MOST_SECONDS, MOST_STEPS, Quantity, SpecModel, cel, rules
from rtj_operator.api.policies import AccumulationSave, IntervalPolicy, Medium, WhenBusy

RUN_ID_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"
CHECKPOINT_ID_PATTERN = r"^\d{12}-\d{10}-[0-9a-f]{8}$"


class Store(SpecModel):
    """Object store that holds the journal and the checkpoints."""

    url: str = Field(
        max_length=1024,
        json_schema_extra=rules(
            cel(
                "self.matches('^s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[A-Za-z0-9._=-]+)*/?$')",
                "store.url must be s3://bucket or s3://bucket/prefix; file:// is for `rtj run` only, since the "
                "operator "
                "must be able to fence a run from outside",
            ),
            cel(
                "self == oldSelf",
                "store.url cannot change: the run's journal is there. Make a new job with checkpoint.resumeFrom to "
                "move a run",
                reason="FieldValueForbidden",
            ),
        ),
    )
    """Bucket and prefix, `s3://bucket/prefix`. Everything of a run lies below `<url>/<namespace>/<runId>/`.
    Immutable."""
    endpoint: str | None = Field(
        default=None,
        max_length=512,
        json_schema_extra=rules(
            cel(
                "self.matches('^https?://[^/?#@ ]+/?$')",
                "store.endpoint must be http(s)://host[:port] without path or user",
            )
        ),
    )
    """Address of an S3 server other than AWS. Left out: the operator's own setting, else AWS."""
    region: str | None = Field(default=None, max_length=64, pattern=r"^[A-Za-z0-9-]+$")
    """Region of the bucket. Left out: the operator's own setting."""
    credentials_secret: str | None = Field(
        default=None, max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"
    )
    """Secret in the job's namespace with AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and, if any, AWS_SESSION_TOKEN.
    Only the sidecar sees it. The operator allows certain names only. Left out: the operator's own setting
    (rtj-store), if it exists."""


class ResumeFrom(SpecModel):
    """Restore point of another run, from which this run starts as a fork."""

    run_id: str = Field(max_length=128, pattern=RUN_ID_PATTERN)
    """Run to fork from, in the same store and namespace."""
    checkpoint_id: str | None = Field(default=None, max_length=32, pattern=CHECKPOINT_ID_PATTERN)
    """Checkpoint of that run. Left out: its newest committed one."""


class Staging(SpecModel):
    """The volume that trainer and sidecar share: ranks stage shards in it, the sidecar uploads from it."""

    medium: Medium = Medium.MEMORY
    """Memory: fastest; its pages count against the trainer's memory. Disk: for nodes with little memory and fast
    disks."""
    size: Quantity | None = None
    """Size limit, at least the bytes that one node saves. With medium Memory the trainer's memory limit, if it has
    one, is raised by it. Left out: no limit of its own."""


class Retention(SpecModel):
    """Which committed checkpoints stay. The newest verified one, the current restore point and held ones always do."""

    keep_last: int = Field(default=3, ge=2, le=1000)
    """How many of the newest ones stay."""
    keep_every_steps: int | None = Field(default=None, ge=1, le=MOST_STEPS)
    """The first checkpoint of every so many steps stays as well."""


class Checkpoint(SpecModel):
    """Saving and resuming."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            cel(
                "has(self.runId) == has(oldSelf.runId) && (!has(self.runId) || self.runId == oldSelf.runId)",
                "checkpoint.runId cannot change: it names the run's journal. Make a new job with "
                "checkpoint.resumeFrom instead",
                reason="FieldValueForbidden",
            ),
            cel(
                "!(has(self.intervalSteps) && self.intervalSteps == 0 && has(self.intervalSeconds) && "
                "self.intervalSeconds == 0)",
                "checkpoint.intervalSteps and checkpoint.intervalSeconds cannot both be 0: nothing would ever be "
                "saved",
            ),
            cel(
                "!(has(self.adopt) && self.adopt && has(self.resumeFrom))",
                "checkpoint.adopt and checkpoint.resumeFrom exclude each other: take over a run, or start a fork "
                "of one",
            ),
        )
    )

    store: Store
    """Object store that holds the journal and the checkpoints."""
    run_id: str | None = Field(default=None, max_length=128, pattern=RUN_ID_PATTERN)
    """Name of the run in the store. Left out: the job's name. A run belongs to the object (uid) that started it; one
    that was deleted with its object (deletionPolicy) is not begun again. Immutable."""
    resume_from: ResumeFrom | None = None
    """Start as a fork of another run."""
    adopt: bool = False
    """True: take over a run of this name that another object owned, which is fenced. Acted on once."""
    interval_steps: int = Field(default=500, ge=0, le=MOST_STEPS)
    """Save every so many steps. 0: off. Not used with intervalPolicy Auto."""
    interval_seconds: int = Field(default=600, ge=0, le=MOST_SECONDS)
    """Save when so many seconds have passed since the last save began. 0: off. With intervalPolicy Auto it is the
    longest interval that may be chosen, and applies until a save has been measured; 0: an hour."""
    interval_policy: IntervalPolicy = IntervalPolicy.FIXED
    """Fixed: the intervals above. Auto: the operator chooses the interval that wastes least, from what saves cost and
    how often work is lost, from 10 s (or what a save takes) to intervalSeconds; running ranks follow it."""
    when_busy: WhenBusy = WhenBusy.SKIP
    """What a due save does while another one is in flight: Skip it, or Wait for the other."""
    save_timeout_seconds: int = Field(default=1800, ge=1, le=MOST_SECONDS)
    """A save that has not committed by then is reported as stalled."""
    upload_bytes_per_second: int | None = Field(default=None, ge=1 << 20, le=MOST_BYTES)
    """What one pod may send to an S3 store while it trains, so that saves leave room on a link that training needs,
    too. Saves that training waits for (an order, the last one, whenBusy Wait) are not held up, nor are weights that do
    not train. A change counts from the next attempt on. Left out: no limit."""
    accumulation_save: AccumulationSave = AccumulationSave.BOUNDARY
    """What a save in the middle of gradient accumulation holds. boundary: saves wait for the window's end; when pods
    must go sooner, the window's start is saved and the window runs again. reduced: the gradients so far, reduced; any
    mesh goes on (1e-6). raw: each rank's own gradients; the same mesh goes on bit for bit, at up to one model of
    gradients per rank and save."""
    max_failed_saves: int = Field(default=5, ge=0, le=1000)
    """So many saves in a row that failed for a reason that a new attempt may cure (replicas that drifted apart,
    staging) end the attempt; the next one starts from the newest commit. A store that is away never counts. 0: off."""
    staging: Staging = Staging()
    """Shared volume of trainer and sidecar."""
    retention: Retention = Retention()
    """Which committed checkpoints stay."""
