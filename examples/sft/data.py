"""Conversations: a file with a JSON object a line, or, for `sums`, arithmetic that is made on the spot."""

from datasets import Dataset, load_dataset


def conversations(name: str) -> Dataset:
    """Rows with `prompt` and `completion`, both lists of turns: the loss is that of the completion alone."""
    if name == "sums":
        return Dataset.from_list([sum_of(a, b) for a in range(16) for b in range(a + 1)])
    return load_dataset("json", data_files=name, split="train")  # not streamed: a resume asks for row i


def sum_of(a: int, b: int) -> dict[str, list[dict[str, str]]]:
    return {
        "prompt": [{"role": "user", "content": f"What is {a} + {b}?"}],
        "completion": [{"role": "assistant", "content": f"{a} + {b} = {a + b}"}],
    }
