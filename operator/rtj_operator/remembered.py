"""What the last look at each job read, for the only decision that may be made from memory: that nothing is to be done.

A job that trains is looked at every few seconds, and most looks find nothing. Those cost no request to the API server:
the sidecar is asked, and `decide` judges with what was read before. As soon as it wants anything more than to show what
the sidecar said, everything is read afresh and decided again. A watch event of a version that is not known here makes
the memory of that job stale, and so does a difference that a sweep finds.
"""

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field

from rtj_operator.decide.observed import JobView, PodView
from rtj_operator.kube import Object
from rtj_operator.prepared import Prepared
from rtj_operator.queue import Key
from trainer_sidecar.contract.fault_order import FAULT_ANNOTATION
from trainer_sidecar.contract.plan import Order

Versions = Mapping[str, str]
"""resourceVersion by uid: of the job, its Jobs and its pods."""


Asks = tuple[object, ...]
"""A job's uid, generation, deletion and finalizers: no more can be asked of it."""


@dataclass
class Entry:
    """One job as it was read. Only a calm one keeps more than its versions."""

    versions: dict[str, str]
    raw: Object | None = None
    jobs: tuple[JobView, ...] = ()
    pods: tuple[PodView, ...] = ()
    """Without their sidecars' answers."""
    prepared: Prepared | None = None
    """Made of `raw` at the first glance."""
    written_in: int = 0
    """The number of the last sweep that had begun when the job itself was written last."""

    def keep(self, prepared: Prepared, raw: Object) -> None:
        """`prepared` was made of `raw`, of which a write and an event need only the head from now on."""
        self.prepared, self.raw = prepared, _head_of(raw)


def entry_of(
    raw: Object, jobs: tuple[JobView, ...], pods: tuple[PodView, ...], versions: dict[str, str]
) -> Entry:
    """The entry of a job that was read: whole when it is calm."""
    if not is_calm(raw, jobs, pods):
        return Entry(versions)
    return Entry(versions, _without_managers(raw), jobs, pods)


def _without_managers(raw: Object) -> Object:
    """The object without the longest part of its metadata, which nobody reads."""
    meta = {k: v for k, v in raw["metadata"].items() if k != "managedFields"}
    return {**raw, "metadata": meta}


def _head_of(raw: Object) -> Object:
    """The object without spec and status, of which a thousand jobs have a hundred megabytes."""
    return {k: v for k, v in _without_managers(raw).items() if k not in ("spec", "status")}


def version_of(body: Object) -> dict[str, str]:
    """An object's uid and resourceVersion."""
    meta = body["metadata"]
    return {meta["uid"]: meta.get("resourceVersion", "")}


def asks_of(body: Object) -> Asks:
    """What this version of an object asks for."""
    meta = body["metadata"]
    return meta["uid"], meta.get("generation"), meta.get("deletionTimestamp"), meta.get("finalizers")


@dataclass
class Memory:
    """Entries by key. One event loop owns it."""

    _entries: dict[Key, Entry] = field(default_factory=dict)
    _stale: set[Key] = field(default_factory=set)
    _calm: int = 0
    _sweeps: int = 0
    _held: dict[Key, list[Object]] = field(default_factory=dict)
    """What watches saw while this process was writing: its own write may come back before the answer does."""
    _told: dict[Key, Versions] = field(default_factory=dict)
    """The last write that says why a job is tried again later: it comes back, maybe after the next look has begun."""
    _asks: dict[Key, Asks] = field(default_factory=dict)
    """What was asked of each job when it was read last."""

    def __len__(self) -> int:
        return len(self._entries)

    def calm(self, key: Key) -> Entry | None:
        """What a glance may judge by; None: everything has to be read."""
        entry = self._entries.get(key)
        return entry if entry is not None and entry.raw is not None and key not in self._stale else None

    @property
    def calm_jobs(self) -> int:
        """How many jobs are only glanced at."""
        return self._calm

    def changed(self, key: Key, body: Object) -> bool:
        """A watch saw `body`. True, and the memory is stale, unless exactly that version was read or written here."""
        if key in self._held:
            self._held[key].append(body)
            return False
        if version_of(body) == self._told.get(key):
            return False
        entry = self._entries.get(key)
        if (
            entry is not None
            and key not in self._stale
            and version_of(body).items() <= entry.versions.items()
        ):
            return False
        self.stale(key)
        return True

    def writing(self, key: Key) -> None:
        """A write of the job itself begins; `written` must follow."""
        self._held[key] = []

    def written(self, key: Key, body: Object | None) -> bool:
        """The write has ended: the object as it is now, or None when that is not known. False when it is stale."""
        held, entry = self._held.pop(key, []), self._entries.get(key)
        if body is None or entry is None:
            self.stale(key)
            return False
        entry.versions |= version_of(body)
        entry.written_in = self._sweeps
        return not any(self.changed(key, seen) for seen in held)

    def told(self, key: Key, body: Object) -> None:
        """`body` was written only to say why the job is tried again later: when it comes back that is no news."""
        self._told[key] = version_of(body)

    def read(self, key: Key, raw: Object) -> None:
        """`raw` is the job as it is now, and is about to be decided on."""
        self._asks[key] = asks_of(raw)

    def only_status(self, key: Key, body: Object) -> bool:
        """`body` is the job, and only its status was written since it was read: nobody asks for anything by that.

        It is most often this process' own write that comes back. A look at once would ask the sidecars again, and what
        they say differently each time would be written, and so on: such a look waits until the next is due anyway.
        """
        return self._asks.get(key) == asks_of(body)

    def gone(self, key: Key) -> None:
        """The job does not exist any more."""
        self.forget(key)
        self._told.pop(key, None)
        self._asks.pop(key, None)

    def sweep_begins(self) -> int:
        """The number of a sweep that is about to read all jobs."""
        self._sweeps += 1
        return self._sweeps

    def differs(self, key: Key, job: Versions, owned: Versions, sweep: int) -> bool | None:
        """Whether that sweep saw something else than what is remembered; None when nothing is.

        Its pages may be seconds old: a job that was written here since it began looks as it did before.
        """
        entry = self._entries.get(key)
        if entry is None:
            return None
        seen = {**owned, **job}
        if entry.written_in >= sweep:
            seen |= {uid: entry.versions.get(uid, "") for uid in job}
        return entry.versions != seen

    def stale(self, key: Key) -> None:
        """The next look at this job reads everything."""
        self._stale.add(key)

    def begin(self, key: Key) -> None:
        """Everything is about to be read: what changes from now on makes it stale again."""
        self._stale.discard(key)
        self.forget(key)

    def remember(self, key: Key, entry: Entry) -> None:
        """Keep what was read, unless something has changed meanwhile."""
        if key in self._stale:
            return
        self.forget(key)
        self._entries[key] = entry
        self._calm += entry.raw is not None

    def forget(self, key: Key) -> None:
        """The job is gone, or about to be read."""
        entry = self._entries.pop(key, None)
        self._calm -= entry is not None and entry.raw is not None

    def keys_in(self, namespaces: Container[str]) -> list[Key]:
        """Jobs of these namespaces that are remembered."""
        return [key for key in self._entries if key[0] in namespaces]

    def drop_others(self, keys: Iterable[Key]) -> None:
        """Jobs that a sweep did not find any more are forgotten."""
        for key in {*self._entries, *self._told, *self._asks} - set(keys):
            self.gone(key)


def is_calm(raw: Object, jobs: tuple[JobView, ...], pods: tuple[PodView, ...]) -> bool:
    """It trains on all the nodes asked for, in one placement whose pods are all as they should be."""
    status = raw.get("status") or {}
    placement, attempt = status.get("placement") or {}, status.get("attempt") or {}
    number, size, epoch = placement.get("number"), placement.get("nodes"), attempt.get("epoch")
    if "deletionTimestamp" in raw["metadata"] or status.get("phase") != "Running" or epoch is None:
        return False
    if FAULT_ANNOTATION in (raw["metadata"].get("annotations") or {}):
        return False  # every pod may have to tell of a fault
    if size != placement.get("wantedNodes") or len(jobs) != 1 or len(pods) != size:
        return False
    job = jobs[0]
    sound = job.placement == number and not (job.suspended or job.deleting or job.failed or job.complete)
    return sound and all(p.placement == number and _is_calm(p, epoch) for p in pods)


def _is_calm(pod: PodView, epoch: int) -> bool:
    plan = pod.plan
    obeys = plan is not None and plan.epoch == epoch and plan.order is Order.RUN
    return obeys and pod.up and pod.ready and not (pod.disruption or pod.evicted or pod.node_lost)
