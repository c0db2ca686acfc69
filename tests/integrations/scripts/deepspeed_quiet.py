"""DeepSpeed and its converter for a parent that forks ranks: what they say at import must not go to its stdout, where
its answers go. The optimizer that no script here uses imports torch's compiler, which costs a rank six seconds."""

import os

os.environ["DS_ACCELERATOR"] = "cpu"
kept = os.dup(1)
os.dup2(2, 1)
try:
    import deepspeed.checkpoint.ds_to_universal
    import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
finally:
    os.dup2(kept, 1)
    os.close(kept)
