"""JSON for training state without pickle: what JSON cannot say is tagged, everything else is refused by name (T14).

Tags are objects with one key that starts with `$`. A reader needs no code of the run to decode them, and a value of
an unknown class never gets into a checkpoint in silence.
"""

from __future__ import annotations

import base64
import collections
import enum
import math
from typing import Any

import numpy as np
import torch

MAX_TENSOR_BYTES = 16 * 1024
"""Tensors above this do not belong into JSON."""


class HalfCharacterError(TypeError):
    """A text that UTF-8, and so JSON, cannot hold."""


def encode(value: Any, path: str = "state") -> Any:
    """JSON-ready form of `value`. Raises TypeError naming path and class of what cannot be represented."""
    refuse_enum(value, path)
    refuse_half(value, path)
    if value is None or isinstance(value, bool | str):
        return value
    _refuse_variants(value, path)
    for classes, function in _ENCODERS:
        if isinstance(value, classes):
            return function(value, path)
    raise TypeError(
        f"{path} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be saved without pickle: "
        "give the object a state_dict() of numbers, strings, lists, tuples, dicts and tensors"
    )


def refuse_enum(value: Any, path: str) -> None:
    """An IntEnum or StrEnum would come back as an int or str. Raises TypeError."""
    if isinstance(value, enum.Enum):
        raise TypeError(
            f"{path} is {type(value).__module__}.{type(value).__qualname__}.{value.name}, which would come back as a "
            f"plain {type(value.value).__name__}: let state_dict() give its value and load_state_dict() make it again"
        )


def refuse_half(value: Any, path: str) -> None:
    """Half of a character (a lone surrogate, as in the name of a file that is no UTF-8) would fail the save long after
    the step, without a name. Raises HalfCharacterError."""
    if not isinstance(value, str) or value.isascii():
        return
    try:
        value.encode()
    except UnicodeEncodeError as error:
        near = value[max(0, error.start - 20) : error.end + 20]
        raise HalfCharacterError(
            f"{path!a} is a text with half a character at position {error.start}, near {near!a}, which UTF-8 cannot "
            "hold: give it as text.encode(errors='backslashreplace').decode(), or as bytes (os.fsencode for a name)"
        ) from None


def _refuse_variants(value: Any, path: str) -> None:
    """A namedtuple or defaultdict would come back as a tuple or dict, and break what uses it long after."""
    plain = next((c for c in (dict, list, tuple) if isinstance(value, c)), None)
    if plain is not None and type(value) not in _CONTAINERS:
        raise TypeError(
            f"{path} is a {type(value).__module__}.{type(value).__qualname__}, which would come back as a plain "
            f"{plain.__name__}: let state_dict() give {plain.__name__}(...) and load_state_dict() make it again"
        )


def decode(value: Any) -> Any:
    """Inverse of `encode`. Raises ValueError on an unknown tag."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((tag, body),) = value.items()
        if tag.startswith("$"):
            if tag not in _DECODERS:
                raise ValueError(f"unknown tag {tag!r} in training state: saved by a newer version")
            return _DECODERS[tag](body)
    return {key: decode(item) for key, item in value.items()}


def _float(value: float, _: str) -> Any:
    return float(value) if math.isfinite(value) else {"$float": repr(float(value))}


def _dict(value: dict[Any, Any], path: str) -> Any:
    if all(isinstance(key, str) and not key.startswith("$") for key in value):
        for key in value:
            refuse_enum(key, f"{path} key")
            refuse_half(key, f"{path} key")
        return {key: encode(item, f"{path}.{key}") for key, item in value.items()}
    return {"$dict": _pairs(value, path)}


def _pairs(value: dict[Any, Any], path: str) -> list[Any]:
    return [[encode(k, f"{path} key"), encode(v, f"{path}[{k!r}]")] for k, v in value.items()]


def _items(value: Any, path: str) -> list[Any]:
    return [encode(item, f"{path}[{i}]") for i, item in enumerate(value)]


def _tensor(value: torch.Tensor, path: str) -> Any:
    nbytes = value.numel() * value.element_size()
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or nbytes > MAX_TENSOR_BYTES:
        raise TypeError(
            f"{path} is a {type(value).__name__} of {nbytes} bytes: only plain tensors up to {MAX_TENSOR_BYTES} "
            "bytes are kept in JSON"
        )
    raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    dtype = str(value.dtype).removeprefix("torch.")
    return {"$tensor": {"dtype": dtype, "shape": list(value.shape), "data": _b64(raw)}}


def _array(value: np.ndarray, path: str) -> Any:
    if value.dtype.kind not in "biufc" or value.nbytes > MAX_TENSOR_BYTES:
        raise TypeError(
            f"{path} is a numpy array of {value.dtype} and {value.nbytes} bytes: cannot be kept in JSON"
        )
    data = _b64(np.ascontiguousarray(value).tobytes())
    return {"$array": {"dtype": value.dtype.str, "shape": list(value.shape), "data": data}}


def _scalar(value: np.generic, path: str) -> Any:
    return {"$numpy": _array(np.asarray(value), path)["$array"]}


def _b64(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def _as_array(body: Any) -> np.ndarray:
    flat = np.frombuffer(base64.b64decode(body["data"]), dtype=np.dtype(body["dtype"]))
    return flat.reshape(body["shape"]).copy()


def _as_tensor(body: Any) -> torch.Tensor:
    raw = bytearray(base64.b64decode(body["data"]))
    dtype = getattr(torch, body["dtype"])
    if not raw:
        return torch.empty(body["shape"], dtype=dtype, device="cpu")
    return torch.frombuffer(raw, dtype=torch.uint8).clone().view(dtype).reshape(body["shape"])


def _as_dict(body: Any) -> dict[Any, Any]:
    return {decode(key): decode(item) for key, item in body}


_CONTAINERS = (dict, list, tuple, collections.OrderedDict, collections.Counter, torch.Size)
"""Those that come back as they were."""
_ENCODERS: list[tuple[Any, Any]] = [
    (np.generic, _scalar),
    (int, lambda v, _: v),
    (float, _float),
    (complex, lambda v, p: {"$complex": [_float(v.real, p), _float(v.imag, p)]}),
    (torch.Size, lambda v, p: {"$size": _items(v, p)}),
    (tuple, lambda v, p: {"$tuple": _items(v, p)}),
    (list, _items),
    (collections.Counter, lambda v, p: {"$counter": _pairs(v, p)}),
    (collections.OrderedDict, lambda v, p: {"$ordered": _pairs(v, p)}),
    (dict, _dict),
    (set | frozenset, lambda v, p: {"$set": _items(sorted(v), p)}),
    (bytes, lambda v, _: {"$bytes": _b64(v)}),
    (torch.dtype, lambda v, _: {"$dtype": str(v).removeprefix("torch.")}),
    (torch.Tensor, _tensor),
    (np.ndarray, _array),
]
_DECODERS: dict[str, Any] = {
    "$float": float,
    "$complex": lambda b: complex(decode(b[0]), decode(b[1])),
    "$tuple": lambda b: tuple(decode(item) for item in b),
    "$size": torch.Size,
    "$counter": lambda b: collections.Counter(_as_dict(b)),
    "$ordered": lambda b: collections.OrderedDict(_as_dict(b)),
    "$dict": _as_dict,
    "$set": lambda b: {decode(item) for item in b},
    "$bytes": base64.b64decode,
    "$dtype": lambda b: getattr(torch, b),
    "$tensor": _as_tensor,
    "$array": _as_array,
    "$numpy": lambda b: _as_array(b)[()],
}
