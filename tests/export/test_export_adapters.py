"""Adapters that were trained here are read by peft; a whole peft model is refused where transformers would drop it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from trainer_sidecar.export.adapters import for_peft


def test_peft_reads_adapters_by_the_names_that_are_exported(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    from transformers import LlamaConfig, LlamaForCausalLM

    def base() -> LlamaForCausalLM:
        torch.manual_seed(0)
        sizes: Any = {
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
        }
        return LlamaForCausalLM(LlamaConfig(vocab_size=50, **sizes))

    wanted = peft.LoraConfig(r=2, target_modules=["q_proj", "embed_tokens"], modules_to_save=["lm_head"])
    model = peft.get_peft_model(base(), wanted)
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter)
    trained = {n: p.detach().contiguous() for n, p in model.named_parameters() if p.requires_grad}
    exported = for_peft(trained)
    assert exported is not None
    save_file(exported, tmp_path / "adapter_model.safetensors")
    model.peft_config["default"].save_pretrained(tmp_path)
    found = peft.PeftModel.from_pretrained(base(), tmp_path)
    read = dict(found.named_parameters())
    assert all(torch.equal(read[name], tensor) for name, tensor in trained.items())

    with pytest.raises(ValueError, match="--trainable and --config"):
        for_peft(dict(model.named_parameters()))
    assert for_peft(dict(base().named_parameters())) is None
