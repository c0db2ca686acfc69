"""The format of torch.distributed.checkpoint: what `dcp.load` of plain PyTorch reads, written by PyTorch itself.

Its writer wants tensors; they are views of memory-mapped safetensors files, so that the model is never in memory as a
whole. The only export that needs torch.
"""

import contextlib
import warnings
from collections.abc import Sequence
from pathlib import Path


def write(files: Sequence[Path], folder: Path) -> None:
    """Turn safetensors files into a checkpoint folder. Raises ValueError without torch, OSError when a disk is full."""
    try:
        from safetensors import safe_open
        from torch.distributed.checkpoint.filesystem import FileSystemWriter
        from torch.distributed.checkpoint.state_dict_saver import save
    except ImportError as exc:
        raise ValueError(f"--format dcp needs torch and safetensors in this environment: {exc}") from exc
    with contextlib.ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group is meant
        opened = [stack.enter_context(safe_open(str(f), framework="pt")) for f in files]
        state = {name: file.get_tensor(name) for file in opened for name in file.offset_keys()}
        save(state, storage_writer=FileSystemWriter(str(folder), sync_files=True), no_dist=True)
