"""Live tensors whose memory is not simply their elements: several of them in one place, conjugated, or guarded.

A buffer that was expanded, conjugated or made under `torch.inference_mode()` is saved like any other. torch refuses to
write elements that share memory, and to write into a guarded tensor; a restore has to.
"""

from __future__ import annotations

import contextlib

import torch


def plainly(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with its bits of conjugation and negation carried out: its memory holds its values."""
    return tensor.resolve_conj().resolve_neg()


def overlaps(tensor: torch.Tensor) -> bool:
    """Whether two elements may lie in one place, as after `expand` and `unfold`."""
    end = 0
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1):
        if stride <= end:
            return True
        end += stride * (size - 1)
    return False


def write(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy; of elements that lie in one place, the first. Whether the others are equal is to be checked when all is
    written."""
    once = tuple(
        slice(0, 1) if stride == 0 and size > 1 else slice(None)
        for stride, size in zip(target.stride(), target.shape, strict=True)
    )
    with writable(target):
        target[once].copy_(source[once])


def writable(tensor: torch.Tensor) -> contextlib.AbstractContextManager[object]:
    """Inside, torch lets a tensor be written that was made under `torch.inference_mode()`."""
    return torch.inference_mode() if tensor.is_inference() else contextlib.nullcontext()
