"""The judgement after a schedule, from the bucket alone: what ranks were told is true, what stands is whole."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from hack.soak.rank import shard_bytes
from hack.soak.story import Told
from trainer_sidecar.contract.journal import Attempt, Entry, Manifest, Quarantined, parse_entry
from trainer_sidecar.contract.keys import RunKeys, parse_journal_key
from trainer_sidecar.store.base import Store
from trainer_sidecar.store.deep import verify_bytes
from trainer_sidecar.store.history import History, restore_point
from trainer_sidecar.store.journal import Journal
from trainer_sidecar.store.verify import BadCheckpointError


@dataclass
class Verdict:
    """Sentences about what is wrong, by class, and what was looked at."""

    wrong: list[str] = field(default_factory=list)
    """Wrong restore points: what was picked or stands is not what it must be."""
    lost: list[str] = field(default_factory=list)
    """Commits that ranks were told of and that are not there."""
    commits: int = 0
    verified: int = 0
    bytes: int = 0
    retired: int = 0
    told: int = 0

    @property
    def good(self) -> bool:
        return not self.wrong and not self.lost


def audit(store: Store, keys: RunKeys, told: Told) -> Verdict:
    """Read the journal raw, then every byte of every checkpoint that stands. Raises StoreError."""
    verdict = Verdict()
    entries = list(_raw(store, keys))
    history = Journal(store, keys, parallel=1).read()
    verdict.commits, verdict.retired = len(history.manifests), len(history.retired)
    verdict.wrong += _order(entries)
    verdict.wrong += _picks(entries, told)
    verdict.lost += _acknowledged(history, told, verdict)
    for manifest in history.manifests.values():
        if manifest.checkpoint_id not in history.retired:
            verdict.wrong += _whole(store, keys, manifest, verdict)
    if history.manifests and history.newest_restorable is None:
        verdict.wrong.append("commits stand and none can be restored")
    return verdict


def _raw(store: Store, keys: RunKeys) -> Iterator[Entry]:
    """As the entries lie there, without the fold's defences."""
    for found in store.list(keys.journal_prefix):
        seq = parse_journal_key(f"/{found.key}")
        assert seq is not None, found.key
        yield parse_entry(store.get(found.key), seq)


def _order(entries: list[Entry]) -> Iterator[str]:
    seqs = [e.seq for e in entries]
    if seqs != list(range(1, len(seqs) + 1)):
        yield f"the journal's slots are {seqs}"
    epoch = 0
    for entry in entries:
        if isinstance(entry, Attempt):
            epoch = entry.seq
        elif isinstance(entry, Quarantined):
            yield f"entry {entry.seq} quarantines {entry.checkpoint_ids}: {entry.reason}"
        elif entry.epoch != epoch:
            yield f"entry {entry.seq} ({entry.kind}) is of epoch {entry.epoch}, after the fence of {epoch}"
    ids = [e.checkpoint_id for e in entries if isinstance(e, Manifest)]
    if len(ids) != len(set(ids)):
        yield f"a checkpoint is committed twice: {ids}"


def _picks(entries: list[Entry], told: Told) -> Iterator[str]:
    """Each attempt starts from the newest commit before its fence."""
    for fenced in told.fences:
        before = [e for e in entries if isinstance(e, Manifest) and e.seq < fenced.epoch]
        newest = before[-1].checkpoint_id if before else None
        picked = fenced.restore.checkpoint_id if fenced.restore else None
        if picked != newest:
            yield f"attempt {fenced.attempt} picked {picked}, the newest commit before it is {newest}"


def _acknowledged(history: History, told: Told, verdict: Verdict) -> Iterator[str]:
    for outcome, checkpoint, sequence in told.acknowledged:
        verdict.told += 1
        entry = history.manifests.get(checkpoint)
        if outcome == "Committed" and (entry is None or str(entry.seq) != sequence):
            yield f"a rank was told that {checkpoint} is entry {sequence}; the journal has {entry and entry.seq}"
        if outcome != "Committed" and entry is not None:
            yield f"a rank was told that {checkpoint} has {outcome}; the journal has it as entry {entry.seq}"


def _whole(store: Store, keys: RunKeys, manifest: Manifest, verdict: Verdict) -> Iterator[str]:
    checkpoint = manifest.checkpoint_id
    try:
        document = verify_bytes(store, keys, restore_point(manifest), parallel=1)
    except BadCheckpointError as exc:
        yield str(exc)
        return
    for shard in document.shards:
        if store.get(keys.shard(checkpoint, shard.rank)) != shard_bytes(manifest.save_id, shard.rank):
            yield f"{checkpoint}: rank {shard.rank} has proven bytes that the rank never staged"
    verdict.verified += 1
    verdict.bytes += document.bytes
