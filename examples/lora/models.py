"""Where model and tokenizer come from: a name, a folder, or made on the spot for `tiny`, without any download.

The examples sft, lora, dpo and continued-pretraining hold the same file, so that each folder is whole.
"""

import sys

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers import PreTrainedTokenizerFast as FastTokenizer

CHAT = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def load(name: str):
    """(model, tokenizer) in float32; training makes bfloat16 of it where the arguments say so."""
    if name == "tiny":
        return tiny_model(), tiny_tokenizer()
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(name)


def tiny_model() -> LlamaForCausalLM:
    """Random, and the same at every call."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=260, max_position_embeddings=256, **sizes))


def tiny_tokenizer() -> FastTokenizer:
    """A token for each byte, and four that mark turns and ends."""
    bytewise = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokens = Tokenizer(models.BPE(vocab=bytewise, merges=[]))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokens.decoder = decoders.ByteLevel()
    tokens.add_special_tokens(["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>"])
    made = FastTokenizer(tokenizer_object=tokens, pad_token="<|pad|>", eos_token="<|end|>")
    made.chat_template = CHAT
    return made


if __name__ == "__main__":  # python models.py FOLDER: the tiny model as files
    for part in load("tiny"):
        part.save_pretrained(sys.argv[1])
