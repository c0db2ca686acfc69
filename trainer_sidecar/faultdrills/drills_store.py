"""D2, D3, D4: what stands in the store is damaged right before a rank dies."""

import time
from collections.abc import Callable

from trainer_sidecar.contract.checkpoint import ManifestFile
from trainer_sidecar.contract.journal import Attempt, Manifest
from trainer_sidecar.faultdrills.measure import step_of
from trainer_sidecar.faultdrills.outcome import Check, Seen
from trainer_sidecar.faultdrills.stage import DrillError, Stage

INTERVAL = 40
"""Steps between saves: long enough that the damaged checkpoint still is the newest when the rank dies."""


def shard_deleted(stage: Stage) -> Seen:
    """D2: a shard of the newest checkpoint is gone."""

    def delete(commit: Manifest) -> str:
        key = _shard(stage, commit)
        stage.store.delete([key])
        return f"deleted {key}"

    return _damaged(stage, delete)


def shard_changed(stage: Stage) -> Seen:
    """D3: a byte of a shard of the newest checkpoint is another one; its size is as it was."""

    def change(commit: Manifest) -> str:
        key = _shard(stage, commit)
        data = bytearray(stage.store.get(key))
        at = len(data) // 2
        data[at] ^= 0xFF
        stage.store.put(key, bytes(data))
        return f"flipped byte {at} of {len(data)} in {key}"

    return _damaged(stage, change)


def _damaged(stage: Stage, act: Callable[[Manifest], str]) -> Seen:
    """Damage the newest checkpoint and kill a rank; the one before it must be used."""
    stage.start(interval=INTERVAL)
    first, older = stage.trains(), stage.commit()
    commit = stage.commit(beyond=older.step)
    said = act(commit)
    stage.note(said)
    fault = time.monotonic()
    killed = stage.signal_rank(stage.pods()[0])
    if next(iter(stage.history().lineage)).seq != commit.seq:
        raise DrillError(
            "a newer commit came between damage and death: the machine is too slow for this drill"
        )
    after, heard = stage.resumed(first)
    restored, before = after.restore, _before(stage, first, commit)
    lost = stage.lost(first, after)
    quarantined = stage.history().quarantined.get(commit.checkpoint_id)
    reason = quarantined.reason if quarantined else ""
    stage.commit(beyond=step_of(after), epoch=after.seq)
    checks = [
        Check(
            name="the previous commit is used",
            holds=restored is not None and restored.checkpoint_id == before.checkpoint_id,
            seen=f"attempt {after.attempt} restored step {restored.step if restored else None}; damaged was step "
            f"{commit.step}, before it step {before.step}",
        ),
        Check(
            name="the damaged one is refused, with the reason",
            holds=bool(reason),
            seen=reason or "it is under no quarantine",
        ),
        stage.same_losses(first, after, 1e-6),
        *stage.proofs(newest_picked=False),
    ]
    return stage.seen(f"{said}; {killed}", checks, lost, heard - fault)


def _before(stage: Stage, first: Attempt, commit: Manifest) -> Manifest:
    """The commit before a commit."""
    own = [m for m in stage.history().manifests.values() if m.epoch == first.seq and m.seq < commit.seq]
    return max(own, key=lambda m: m.seq)


def _shard(stage: Stage, commit: Manifest) -> str:
    """Key of the largest shard of a checkpoint."""
    file = ManifestFile.model_validate_json(stage.store.get(stage.keys.manifest(commit.checkpoint_id)))
    shard = max(file.shards, key=lambda s: s.size)
    return stage.keys.shard(commit.checkpoint_id, shard.rank)


def latest_is_garbage(stage: Stage) -> Seen:
    """D4: the hint to the newest checkpoint is garbage."""
    stage.start(interval=INTERVAL)
    first = stage.trains()
    commit = stage.commit()
    stage.store.put(stage.keys.latest, b'{"checkpointId": "000000009999-0000000099-deadbeef", "step": 9999')
    stage.note("latest.json is garbage")
    fault = time.monotonic()
    killed = stage.signal_rank(stage.pods()[0])
    second, heard = stage.resumed(first)
    lost = stage.lost(first, second)
    newer = stage.commit(beyond=step_of(second), epoch=second.seq)
    restored = second.restore.step if second.restore else None
    hint = stage.store.get(stage.keys.latest)
    checks = [
        Check(
            name="the newest commit is found by scanning",
            holds=restored is not None and restored >= commit.step,
            seen=f"attempt {second.attempt} restored step {restored}; step {commit.step} was committed",
        ),
        Check(
            name="the hint is right again",
            holds=newer.checkpoint_id.encode() in hint or b"deadbeef" not in hint,
            seen=hint[:120].decode(errors="replace"),
        ),
        stage.same_losses(first, second, 1e-6),
        *stage.proofs(),
    ]
    return stage.seen(
        f"latest.json named a checkpoint that never was, and broke off; {killed}", checks, lost, heard - fault
    )
