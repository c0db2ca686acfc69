"""Tells when `rtj run` starts from, or ends with, a checkpoint whose loss was no number: nothing mends that later."""

from trainer_sidecar.store.history import History


def why_no_good(history: History, checkpoint_id: str) -> str:
    """A sentence when that commit was made while loss or gradient norm were no finite number; else empty.

    It names the newest one from before, and how to go back to it: quarantining a state covers what came of it.
    """
    found = history.manifests.get(checkpoint_id)
    if found is None or found.finite:
        return ""
    lineage = [m for m in history.lineage if history.restorable(m.checkpoint_id)]
    marked = [m for m in lineage if not m.finite]
    before = next((m for m in lineage if m.finite), None)
    sentence = (
        f"the loss or gradient norm was no finite number at step {found.step}, so its weights are likely lost"
    )
    if before is None:
        return f"{sentence}; no checkpoint from before it is left: begin another run with --run-id"
    first = marked[-1].checkpoint_id if marked else checkpoint_id
    return (
        f"{sentence}; the newest one from before is step {before.step} ({before.checkpoint_id}). To go back to it: rtj "
        f"checkpoints quarantine {first} --descendants --reason 'loss not finite', correct what made it so, run again"
    )
