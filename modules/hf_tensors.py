"""The tensors of a Hugging Face checkpoint directory: one `model.safetensors`, or shards under an index.

Names, shapes and files are known from headers alone; a tensor's bytes are read when it is asked for. Pickles are never
opened: loading one runs whatever code its author put there.

Source: the format's README, github.com/huggingface/safetensors; shards as transformers writes them.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import Tensor

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True)
class StoredTensors:
    """What a directory holds, by Hugging Face's names."""

    files: Mapping[str, Path]
    shapes: Mapping[str, tuple[int, ...]]
    kinds: Mapping[str, str]
    """The format's names of dtypes."""

    def read(self, name: str) -> Tensor:
        """One tensor. The file is mapped for this one alone, so that pages of others do not pile up in memory."""
        from safetensors import safe_open

        with safe_open(self.files[name], framework="pt") as file:
            return file.get_tensor(name)


def stored_tensors(directory: Path) -> StoredTensors:
    """Reads the headers.

    Raises:
        ValueError: no safetensors there, a shard that is missing or cut short, or an index that does not fit its
            shards; all at once.
    """
    from safetensors import SafetensorError, safe_open

    paths = weight_files(directory)
    broken: list[str] = []
    files: dict[str, Path] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    kinds: dict[str, str] = {}
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - no mapping
                    if name in files:
                        broken.append(f"{path}: holds {name}, which {files[name].name} holds too.")
                    header = file.get_slice(name)
                    files[name], shapes[name], kinds[name] = path, tuple(header.get_shape()), header.get_dtype()
        except (SafetensorError, OSError) as error:
            broken.append(
                f"{path}: is no whole safetensors file ({path.stat().st_size} bytes: {error}). "
                "Download or copy it again."
            )
    if not broken and (directory / INDEX).is_file() and paths != [directory / SINGLE]:
        for name, shard in _weight_map(directory).items():
            if name not in files or files[name].name != shard:
                broken.append(f"{directory / INDEX}: says that {shard} holds {name}, and it does not.")
    if broken:
        raise ValueError("\n".join(broken))
    return StoredTensors(files, shapes, kinds)


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint directory, in the order of their names.

    Raises:
        ValueError: there are none, or some of those that the index names are missing.
    """
    if (directory / SINGLE).is_file():
        return [directory / SINGLE]
    if not (directory / INDEX).is_file():
        pickles = sorted(path.name for pattern in _PICKLES for path in directory.glob(pattern))
        if pickles:
            raise ValueError(
                f"{directory}: holds pickled weights ({', '.join(pickles[:3])}), and those are never loaded, since a "
                "pickle can run any code. Where you trust them, convert once in an environment with transformers: "
                "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER, safe_serialization=True)."
            )
        raise ValueError(f"{directory}: has neither {SINGLE} nor {INDEX}. Is it a checkpoint directory?")
    shards = sorted(set(_weight_map(directory).values()))
    odd = [shard for shard in shards if Path(shard).name != shard]
    if odd:
        raise ValueError(f"{directory / INDEX}: names files elsewhere: {', '.join(odd)}.")
    missing = [shard for shard in shards if not (directory / shard).is_file()]
    if missing:
        raise ValueError(
            f"{directory / INDEX}: names {len(missing)} of {len(shards)} files that are not there: "
            f"{', '.join(missing)}. Download or copy them again."
        )
    return [directory / shard for shard in shards]


def _weight_map(directory: Path) -> dict[str, str]:
    found = read_json_object(directory / INDEX).get("weight_map")
    if not isinstance(found, dict) or not found or not all(isinstance(shard, str) for shard in found.values()):
        raise ValueError(f"{directory / INDEX}: has no weight_map of tensor names and files.")
    return found


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ValueError: no such file, or no JSON object in it.
    """
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise ValueError(f"{path}: is no JSON: {error}.") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path}: must hold a JSON object.")
    return found


def checkpoint_digest(directory: Path) -> str:
    """Identity of a checkpoint: every byte of `config.json` and of the weights, whatever the folder is called.

    Whole files and not sizes and times: a copy is the same checkpoint, and one trained further has the same sizes.
    About a second per gigabyte, once per process and version of a file.
    """
    total = hashlib.sha256()
    for path in (directory / "config.json", *weight_files(directory)):
        stat = path.stat()
        total.update(f"{path.name} {_file_digest(path.resolve(), stat.st_size, stat.st_mtime_ns)}\n".encode())
    return total.hexdigest()[:32]


@lru_cache(maxsize=1024)
def _file_digest(path: Path, size: int, modified: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
