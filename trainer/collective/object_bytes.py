"""Objects as bytes, for other trainers: numbers, texts, bytes, lists, tuples, dicts, None, tensors
and numpy arrays.  Bytes are never run as code.

The bytes are one safetensors file: the tensors and arrays by number, and ``tree``, a JSON text of
all the rest, where ``{"tensor": 0}`` stands for the tensor 0.
"""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from transpiler.files import bounded_json

TREE = "tree"
PLAIN = (type(None), bool, int, float, str)
EXPECTED = "expected numbers, texts, bytes, lists, tuples, dicts, None, dense tensors, numpy arrays"


def to_bytes(value: Any) -> bytes:
    """An object as bytes.

    Raises:
        TypeError: the object is, or holds, something of another type.
    """
    writer = _Writer()
    tree = json.dumps(writer.node(value, "the object"))
    text = torch.frombuffer(bytearray(tree.encode()), dtype=torch.uint8)
    return safetensors.torch.save({TREE: text, **writer.tensors})


def from_bytes(data: bytes) -> Any:
    """The object that was written; its tensors are in main memory, and a subclass of dict is a
    dict.
    """
    tensors = safetensors.torch.load(data)
    return _read(bounded_json.loads(bytes(tensors.pop(TREE).numpy())), tensors)


class _Writer:
    """Takes the tensors out of an object.

    Attributes:
        tensors: by number.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def node(self, value: Any, where: str) -> Any:
        """A value as JSON: every JSON object has one key, the type that it stands for."""
        if type(value) in PLAIN:
            return value
        if type(value) is bytes:
            return {"bytes": base64.b64encode(value).decode()}
        if type(value) in (list, tuple):
            inner = [self.node(each, f"{where}[{i}]") for i, each in enumerate(value)]
            return inner if type(value) is list else {"tuple": inner}
        if isinstance(value, dict):
            return {
                "dict": [
                    [self._key(key, where), self.node(each, f"{where}[{key!r}]")]
                    for key, each in value.items()
                ]
            }
        if isinstance(value, Tensor):
            return {"tensor": self._tensor(value, where)}
        if isinstance(value, np.ndarray | np.generic):
            return {
                "number" if isinstance(value, np.generic) else "array": self._array(value, where)
            }
        raise TypeError(f"{where}: {EXPECTED}, got {type(value).__name__}")

    def _key(self, key: Any, where: str) -> Any:
        if type(key) not in PLAIN:
            raise TypeError(
                f"{where}: expected keys that are None, bool, int, float or str, got "
                f"{type(key).__name__}"
            )
        return key

    def _array(self, value: Any, where: str) -> str:
        try:
            return self._tensor(torch.from_numpy(np.array(value)), where)
        except TypeError:
            raise TypeError(
                f"{where}: {EXPECTED}, got a numpy array of {value.dtype}, which no tensor can hold"
            ) from None

    def _tensor(self, value: Tensor, where: str) -> str:
        if value.layout is not torch.strided or value.is_quantized:
            raise TypeError(f"{where}: {EXPECTED}, got a tensor of layout {value.layout}")
        if value.dtype is torch.complex128:  # which safetensors lacks
            raise TypeError(f"{where}: {EXPECTED}, got a tensor of {value.dtype}")
        number = str(len(self.tensors))
        # a copy: safetensors refuses tensors that share memory
        copy = value.detach().resolve_conj().resolve_neg().cpu()
        self.tensors[number] = copy.clone(memory_format=torch.contiguous_format)
        return number


def _read(node: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(node, list):
        return [_read(each, tensors) for each in node]
    if not isinstance(node, dict):
        return node
    ((kind, held),) = node.items()
    if kind == "bytes":
        return base64.b64decode(held)
    if kind == "tuple":
        return tuple(_read(each, tensors) for each in held)
    if kind == "dict":
        return {key: _read(each, tensors) for key, each in held}
    found = tensors[held]
    if kind == "tensor":
        return found
    return found.numpy() if kind == "array" else found.numpy()[()]
