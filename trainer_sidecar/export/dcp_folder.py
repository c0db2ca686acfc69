"""The format of torch.distributed.checkpoint: what `dcp.load` of plain PyTorch reads, written by PyTorch itself.

Its writer wants tensors; they are views of memory-mapped safetensors files, so that the model is never in memory as a
whole, but for tensors of dtypes that safetensors lacks (complex ones). The only export that needs torch.
"""

import contextlib
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainer_sidecar.export.safetensors_file import DTYPES
from trainer_sidecar.export.source import Stored


def write(files: Sequence[Path], tensors: Mapping[str, Stored], folder: Path) -> None:
    """Turn safetensors files of these tensors into a checkpoint folder. Raises ValueError without torch, or for a dtype
    that this torch lacks, OSError when a disk is full."""
    try:
        import torch
        from safetensors import safe_open
        from torch.distributed.checkpoint.filesystem import FileSystemWriter
        from torch.distributed.checkpoint.state_dict_saver import save
    except ImportError as exc:
        raise ValueError(f"--format dcp needs torch and safetensors in this environment: {exc}") from exc
    with contextlib.ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group is meant
        opened = [stack.enter_context(safe_open(str(f), framework="pt")) for f in files]
        state = {name: file.get_tensor(name) for file in opened for name in file.offset_keys()}
        for name, stored in tensors.items():
            if stored.dtype in DTYPES:
                continue
            dtype = getattr(torch, stored.dtype, None)
            if dtype is None:
                raise ValueError(
                    f"{name} has dtype {stored.dtype}, which torch {torch.__version__} does not have: use a newer one, "
                    f"or leave it out by --exclude '{name}'"
                )
            # A copy, since a view of larger elements must begin where they may.
            state[name] = state[name].flatten().clone().view(dtype).reshape(stored.shape)
        save(state, storage_writer=FileSystemWriter(str(folder), sync_files=True), no_dist=True)
