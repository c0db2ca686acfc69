"""Names of adapters as peft's own files have them, so that `PeftModel.from_pretrained` reads an export."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

_T = TypeVar("_T")
_WRAPPED = "base_model.model."
_ADAPTER = re.compile(r"\.(lora_\w+)\.default(?=\.|$)")
_SAVED_MODULE = re.compile(r"\.modules_to_save\.default(?=\.)")


def for_peft(tensors: Mapping[str, _T]) -> dict[str, _T] | None:
    """The adapters under the names of peft's files; None when these are not peft's. Raises ValueError for whole models:
    transformers takes none of such names, and goes on with random weights."""
    adapters = [name for name in tensors if name.startswith(_WRAPPED) and _ADAPTER.search(name)]
    if not adapters:
        return None
    if any(name.endswith(".base_layer.weight") for name in tensors):
        raise ValueError(
            f"{adapters[0]} is an adapter of peft: transformers would take none of such names and go on with random "
            "weights. Export the adapters with --trainable and --config of a folder that has adapter_config.json, "
            "for PeftModel.from_pretrained; or everything as it is with --format safetensors"
        )
    return {_SAVED_MODULE.sub("", _ADAPTER.sub(r".\1", name)): tensor for name, tensor in tensors.items()}
