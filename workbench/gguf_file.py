"""A GGUF file of llama.cpp: settings by key, tensors as float32, and what is no such file.

    settings   llama.block_count = 30, tokenizer.ggml.tokens = [...]      typed, since any key may hold any kind
    tensors    blk.0.attn_q.weight, Q4_1                                  stored last axis first, dequantised one by one

Nothing in the file is executed. Source: the format's page, github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

import re
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from workbench.errors import UserError

T = TypeVar("T")
_KINDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", list: "a list"}


class GgufFile:
    """An open file; raises UserError for one that cannot be read whole, ValueError for what it holds."""

    def __init__(self, path: Path) -> None:
        try:
            import gguf
        except ImportError as error:
            raise UserError("reading GGUF needs the package gguf. Run `pip install 'workbench[gguf]'`.") from error
        _check_start(path)
        try:
            reader = gguf.GGUFReader(path)
        except Exception as error:  # numpy's, struct's and the package's own kinds, for a broken file
            if "GGMLQuantizationType" in str(error):
                number = re.search(r"\b\d+\b", str(error))  # "np.uint32(99) is not a valid GGMLQuantizationType"
                raise UserError(
                    f"{path}: holds tensors in format {number and number[0]}, which the package gguf does not know. "
                    "Upgrade it, or take the same model in another quantisation, such as Q8_0."
                ) from error
            raise UserError(f"{path}: is no whole GGUF file: {error}. Download or copy it again.") from error
        if reader.byte_order != "I":  # the package would read the bytes of such weights as other numbers
            raise UserError(f"{path}: is of the other byte order. Run `gguf-convert-endian {path} little` first.")
        self._fields = reader.fields
        self._dequantize = gguf.quants.dequantize
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.shapes: dict[str, tuple[int, ...]] = {
            name: tuple(tensor.shape[::-1].tolist()) for name, tensor in self._tensors.items()
        }
        """Of each tensor, first axis first as in torch."""

    def keys(self, prefix: str) -> list[str]:
        """Keys of the settings that begin so."""
        return [key for key in self._fields if key.startswith(prefix)]

    def raw(self, key: str) -> Any:
        """A setting as it stands there; None where it is missing."""
        return self._fields[key].contents() if key in self._fields else None

    def get(self, key: str, kind: type[T]) -> T | None:
        """A setting of the kind expected; None where it is missing.

        Raises:
            ValueError: it is of another kind.
        """
        found = self.raw(key)
        if kind is float and type(found) is int:
            found = float(found)
        if found is None or type(found) is kind:
            return found
        raise ValueError(f"{key}={found!r} must be {_KINDS[kind]}.")

    def need(self, key: str, kind: type[T]) -> T:
        """A setting of the kind expected.

        Raises:
            ValueError: it is missing, or of another kind.
        """
        found = self.get(key, kind)
        if found is None:
            raise ValueError(f"{key} is missing.")
        return found

    def check_formats(self) -> None:
        """Raises ValueError naming tensors whose format cannot be turned into float32, before the long work begins."""
        first_of = {tensor.tensor_type: tensor for tensor in reversed(self._tensors.values())}
        for kind, tensor in first_of.items():
            try:
                self._dequantize(tensor.data[:1], kind)
            except NotImplementedError as error:
                names = [name for name, other in self._tensors.items() if other.tensor_type == kind]
                raise ValueError(
                    f"{len(names)} tensors are stored as {kind.name}, which cannot be turned into float32: "
                    f"{', '.join(names[:3])}. Take the same model in another quantisation, such as Q8_0."
                ) from error

    def float32(self, name: str) -> np.ndarray:
        """A tensor's values, a copy off the file."""
        tensor = self._tensors[name]
        return np.array(self._dequantize(tensor.data, tensor.tensor_type), np.float32)


def _check_start(path: Path) -> None:
    if path.is_dir():
        raise UserError(f"{path}: is a folder. Name the .gguf file in it.")
    try:
        with path.open("rb") as file:
            start = file.read(4)
    except FileNotFoundError as error:
        raise UserError(f"{path}: there is no such file.") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}.") from error
    if start != b"GGUF":
        raise UserError(f"{path}: is no GGUF file, since it does not begin with the letters GGUF.")
