"""A causal LM that is made on the spot, and rows of unlike length for it: tokens, not rows, weigh in the loss."""

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM


def model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=16, **sizes))


class Rows(torch.utils.data.Dataset):
    def __init__(self, count, lengths=5):
        self.count, self.lengths = count, lengths

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        ids = torch.tensor([(i * 7 + k * k) % 64 for k in range(4 + i % self.lengths)])
        return {"input_ids": ids, "labels": ids}


def collate(rows):
    return {
        "input_ids": pad_sequence([r["input_ids"] for r in rows], batch_first=True),
        "labels": pad_sequence([r["labels"] for r in rows], batch_first=True, padding_value=-100),
        "attention_mask": pad_sequence([torch.ones_like(r["labels"]) for r in rows], batch_first=True),
    }
