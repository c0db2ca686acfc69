"""Digests of what a run reads: tokenizer files, chat template, dataset. Read in blocks, never as a whole in memory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

_BLOCK = 1 << 20
_SAMPLED = 64
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
_TOKENIZER_SUFFIXES = (".model", ".tiktoken")
_SHOWN_FILES = 64
"""Files of a dataset that are shown one by one; the rest are in the digest alone."""


@dataclass
class DatasetManifest:
    """Length and content digest of a dataset that is read as a stream: feed `add` with each record, in order.

    The digest covers lengths and bytes of all records. `fields()` may be asked at any time.
    """

    length: int = 0
    _hash: Any = field(default_factory=lambda: hashlib.sha256(b"rtj-dataset-1"), repr=False)

    def add(self, record: bytes | str) -> None:
        """One record."""
        data = record.encode() if isinstance(record, str) else record
        self._hash.update(len(data).to_bytes(8, "little"))
        self._hash.update(data)
        self.length += 1

    def fields(self) -> dict[str, str]:
        return {"length": str(self.length), "content": f"sha256:{self._hash.hexdigest()}"}


def file_digest(path: Path) -> str:
    """`sha256:<hex>` of a file. Raises ValueError when it cannot be read."""
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            while block := file.read(_BLOCK):
                digest.update(block)
    except OSError as error:
        raise ValueError(f"{path} cannot be read for its fingerprint: {error}") from error
    return f"sha256:{digest.hexdigest()}"


def tokenizer_fields(tokenizer: Any) -> dict[str, str]:
    """Files by name, or vocabulary, merges and special tokens of a tokenizer object."""
    if isinstance(tokenizer, str | Path):
        return _tokenizer_files(Path(tokenizer))
    fields: dict[str, str] = {"class": type(tokenizer).__name__}
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None and callable(getattr(backend, "to_str", None)):
        fields["backend"] = _digest(str(backend.to_str()))
    if callable(getattr(tokenizer, "get_vocab", None)):
        vocabulary = dict(tokenizer.get_vocab())
        fields["size"] = str(len(vocabulary))
        fields["vocabulary"] = _digest(json.dumps(sorted(vocabulary.items())))
    special = getattr(tokenizer, "special_tokens_map", None)
    if isinstance(special, Mapping):
        fields["specialTokens"] = _digest(json.dumps({k: str(v) for k, v in sorted(special.items())}))
    if len(fields) == 1:
        raise ValueError(
            f"a tokenizer of class {type(tokenizer).__name__} has neither get_vocab() nor a backend: "
            "give the folder or file that it was read from"
        )
    return fields


def _tokenizer_files(path: Path) -> dict[str, str]:
    if path.is_file():
        return {path.name: file_digest(path)}
    found = sorted(p for p in path.glob("*") if p.name in _TOKENIZER_FILES or p.suffix in _TOKENIZER_SUFFIXES)
    if not found:
        raise ValueError(
            f"no tokenizer file in {path}: looked for {', '.join(_TOKENIZER_FILES[:5])}, … and *.model"
        )
    return {p.name: file_digest(p) for p in found}


def template_fields(template: Any) -> dict[str, str]:
    """Digest of a chat template: its text, its file, or that of a tokenizer object (several templates by name)."""
    if isinstance(template, Path):
        return {"text": file_digest(template)}
    text = template if isinstance(template, str) else getattr(template, "chat_template", None)
    if isinstance(text, str):
        return {"text": _digest(text)}
    if isinstance(text, Mapping):
        return {str(name): _digest(str(value)) for name, value in text.items()}
    return {"text": "none"}


def dataset_fields(data: Any) -> dict[str, str]:
    """Length and content of a dataset. Raises ValueError for an object of which nothing can be told."""
    if isinstance(data, DatasetManifest):
        return data.fields()
    if isinstance(data, str | Path):
        return _files(_walk(Path(data)), Path(data))
    if isinstance(data, Sequence) and data and all(isinstance(item, str | Path) for item in data):
        return _files([Path(item) for item in data], None)
    known = getattr(data, "_fingerprint", None)  # Hugging Face datasets: covers content and transforms
    if isinstance(known, str):
        return {"length": str(len(data)), "content": f"datasets:{known}"}
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        return _sampled(data)
    if isinstance(data, Iterable):
        manifest = DatasetManifest()
        for record in data:
            if not isinstance(record, bytes | str):
                raise ValueError(
                    f"an iterable dataset must give bytes or text for its digest, got {type(record).__name__}"
                )
            manifest.add(record)
        return manifest.fields()
    raise ValueError(
        f"a dataset of class {type(data).__name__} has no length and no content: use a DatasetManifest"
    )


def _walk(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    files = sorted(p for p in path.rglob("*") if p.is_file())
    if not files:
        raise ValueError(f"no file in {path} for the dataset's fingerprint")
    return files


def _files(paths: list[Path], root: Path | None) -> dict[str, str]:
    manifest, fields = DatasetManifest(), {"files": str(len(paths))}
    for i, path in enumerate(paths):
        inside = root is not None and path != root
        name = path.relative_to(root).as_posix() if inside and root is not None else path.name
        digest = file_digest(path)
        manifest.add(f"{name} {digest}")
        if i < _SHOWN_FILES:
            fields[f"file.{name}"] = digest
    return {**fields, "content": manifest.fields()["content"]}


def _sampled(data: Any) -> dict[str, str]:
    """Length, and the content of 64 samples spread over a map-style dataset: reading all would take an epoch."""
    length = len(data)
    manifest = DatasetManifest()
    for i in islice(sorted({length * k // _SAMPLED for k in range(_SAMPLED)}), length):
        manifest.add(_bytes(data[i]))
    return {"length": str(length), f"content of {manifest.length} samples": manifest.fields()["content"]}


def _bytes(sample: Any) -> bytes:
    """Bytes that tell two samples apart."""
    if isinstance(sample, bytes):
        return sample
    if isinstance(sample, Mapping):
        return (
            b"{"
            + b",".join(str(k).encode() + b":" + _bytes(v) for k, v in sorted(sample.items(), key=str))
            + b"}"
        )
    if isinstance(sample, list | tuple):
        return b"[" + b",".join(_bytes(item) for item in sample) + b"]"
    if hasattr(sample, "detach"):
        sample = sample.detach().cpu().float() if sample.is_floating_point() else sample.detach().cpu()
        sample = sample.numpy()
    if hasattr(sample, "tobytes"):
        return f"{sample.dtype}{sample.shape}".encode() + bytes(sample.tobytes())
    if sample is None or isinstance(sample, str | int | float):
        return repr(sample).encode()
    raise ValueError(
        f"a sample holds a {type(sample).__name__}, which has no bytes to digest: give a DatasetManifest instead"
    )


def _digest(text: str) -> str:
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()
