"""One sentence for every framework whose script says another batch than the plan: the plan's counts."""

import logging

from trainer_sidecar.contract.plan import Plan

log = logging.getLogger("rtj.train")


def tell_unused(plan: Plan, samples: int, settings: str, rank: int) -> None:
    """Warn, on rank 0, where the script's `settings` would make a step of another number of `samples`."""
    batch = plan.topology.batch.global_batch_size
    if rank == 0 and samples != batch:
        log.warning(
            "a step has %d samples, the plan's global batch (--global-batch of rtj run, batch.globalBatchSize of a job)"
            "; not used: %s",
            batch,
            settings,
        )
