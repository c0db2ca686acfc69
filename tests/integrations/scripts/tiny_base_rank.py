"""The examples' tiny model with weights of its own, as files in `TINY_BASE`; no training."""

import os
import sys

import torch

sys.path.insert(0, os.path.join(os.environ["PYTHONPATH"], "examples", "continued-pretraining"))
from models import load

model, tokenizer = load("tiny")
with torch.no_grad():
    for parameter in model.parameters():
        parameter.add_(0.01 * torch.randn_like(parameter))
for part in (model, tokenizer):
    part.save_pretrained(os.environ["TINY_BASE"])
