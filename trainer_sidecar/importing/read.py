"""Which format a folder is in, by what lies there; what is none of them is told what it is."""

from pathlib import Path

from trainer_sidecar.importing import dcp_folder, hugging_face
from trainer_sidecar.importing.source import Source, UnfitSourceError


def read(folder: Path, format_: str = "auto") -> Source:
    """What `folder` holds; `format_`: auto, hf or dcp. Headers and indexes are read. Raises UnfitSourceError."""
    if not folder.is_dir():
        raise UnfitSourceError(f"{folder} is no folder")
    hf = any((folder / name).is_file() for name in (hugging_face.SINGLE, hugging_face.INDEX))
    dcp = (folder / dcp_folder.METADATA).is_file()
    if format_ == "auto" and hf and dcp:
        raise UnfitSourceError(
            f"{folder} holds a model of Hugging Face and a DCP checkpoint: say --format hf or dcp"
        )
    if hf and format_ in ("auto", "hf"):
        return hugging_face.read(folder)
    if dcp and format_ in ("auto", "dcp"):
        return dcp_folder.read(folder)
    raise UnfitSourceError(f"{folder} has nothing to import: {_what_is_there(folder)}")


def _what_is_there(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir())
    if any(name.startswith("adapter_model.") for name in names):
        return (
            "adapters of peft, no whole model: merge them into it first (merge_and_unload, save_pretrained)"
        )
    if pickled := next((n for n in names if n.endswith((".bin", ".pt", ".pth"))), None):
        return f"{pickled} is a pickle, which may hold code: save the model as safetensors (save_pretrained)"
    wanted = f"{hugging_face.SINGLE}, {hugging_face.INDEX} or {dcp_folder.METADATA}"
    return f"no {wanted}" + (f", only {', '.join(names[:5])}" if names else ", it is empty")
