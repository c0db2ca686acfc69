"""Preferences: a file with a JSON object a line, or, for `sums`, arithmetic, right and wrong, made on the spot."""

from datasets import Dataset, load_dataset


def preferences(name: str) -> Dataset:
    """Rows with `prompt`, `chosen` and `rejected`, each a list of turns."""
    if name == "sums":
        return Dataset.from_list([sum_of(a, b) for a in range(16) for b in range(a + 1)])
    return load_dataset("json", data_files=name, split="train")  # not streamed: a resume asks for row i


def sum_of(a: int, b: int) -> dict[str, list[dict[str, str]]]:
    return {
        "prompt": [{"role": "user", "content": f"What is {a} + {b}?"}],
        "chosen": [{"role": "assistant", "content": f"{a} + {b} = {a + b}"}],
        "rejected": [{"role": "assistant", "content": f"{a} + {b} = {a + b + 1}, I think"}],
    }
