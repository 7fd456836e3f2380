"""Weights of a Hugging Face checkpoint directory, read into a Llama and written from one, as safetensors alone.

Names there carry `model.` in front of everything but `lm_head`. Pickle files are never opened: loading one runs the
code in it.

Source: the safetensors format and Hugging Face's `model.safetensors.index.json`.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from modules.attention.strategies import STRATEGIES
from modules.hf_config import CONFIG_FILE
from modules.llama import Llama, LlamaConfig
from modules.rotary import RotaryConfig

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
SHARD_BYTES = 5_000_000_000
"""Largest file that is written."""
_DTYPES = {"F64", "F32", "F16", "BF16"}
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class Stored(NamedTuple):
    """A tensor of a checkpoint, not read yet."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    """As safetensors names it."""


def check_weights(directory: Path, shape: LlamaConfig) -> None:
    """Holds the names and shapes of all tensors to the model's, reading only the files' heads.

    Raises:
        ValueError: weights that cannot be read, or every missing, unexpected and mis-shaped tensor.
    """
    _match(directory, _tensors(directory), shape)


@torch.no_grad()
def load_weights(model: Llama, directory: Path) -> None:
    """Fills a model, in its own dtype, a tensor at a time.

    Raises:
        ValueError: as `check_weights`, before anything is filled; or a head beside tied embeddings that differs.
    """
    from safetensors import safe_open

    stored = _tensors(directory)
    names = _match(directory, stored, model.config)
    parameters = dict(model.named_parameters())
    for file in sorted({stored[name].file for name in names}):
        with safe_open(file, framework="pt") as tensors:
            for name in (name for name in names if stored[name].file == file):
                parameters[names[name]].copy_(tensors.get_tensor(name))
    if model.config.tied_embeddings and "lm_head.weight" in stored:
        head_VE = _read(stored, "lm_head.weight")
        if not torch.equal(head_VE, _read(stored, "model.embed_tokens.weight")):
            raise ValueError(
                f"{directory}: tie_word_embeddings is true, but lm_head.weight differs from model.embed_tokens.weight. "
                "Set tie_word_embeddings to false in config.json, or remove lm_head.weight."
            )


def save_checkpoint(
    directory: Path,
    weights: Mapping[str, Tensor],
    config_json: Mapping[str, Any],
    *,
    more_files: Mapping[str, bytes] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes a directory that transformers loads: whole, or not at all.

    Args:
        directory: must not exist, or be empty.
        weights: by our names, as `Llama.state_dict()` has them.
        config_json: of `modules.hf_config.shape_as_json`.
        more_files: name -> content, written beside.
        shard_bytes: largest file of weights.
    Raises:
        ValueError: the directory holds something already.
        OSError: it cannot be written; nothing is left.
    """
    from safetensors.torch import save_file

    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ValueError(f"{directory}: exists already and is not empty. Name another directory.")
    temporary = directory.with_name(f".{directory.name}.{os.getpid()}")
    try:
        temporary.mkdir(parents=True)
        named = {_hugging_face_name(name): tensor.contiguous() for name, tensor in weights.items()}
        shards = _shards(named, shard_bytes)
        total = sum(tensor.nbytes for tensor in named.values())
        weight_map: dict[str, str] = {}
        for number, names in enumerate(shards, start=1):
            file = WEIGHTS_FILE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
            save_file({name: named[name] for name in names}, temporary / file, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(names, file)
        if len(shards) > 1:
            _write_json(temporary / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})
        _write_json(temporary / CONFIG_FILE, config_json)
        for name, content in (more_files or {}).items():
            (temporary / name).write_bytes(content)
        os.replace(temporary, directory)  # an empty directory gives way
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _tensors(directory: Path) -> dict[str, Stored]:
    """Every tensor of the checkpoint, from the heads of its files."""
    from safetensors import SafetensorError, safe_open

    found: dict[str, Stored] = {}
    for file in _files(directory):
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (it is no mapping)
                    part = tensors.get_slice(name)
                    found[name] = Stored(file, tuple(part.get_shape()), part.get_dtype())
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file}: is broken or cut short ({error}). Copy or download it again.") from error
    return found


def _files(directory: Path) -> list[Path]:
    index = directory / INDEX_FILE
    if not index.is_file():
        if (directory / WEIGHTS_FILE).is_file():
            return [directory / WEIGHTS_FILE]
        pickles = sorted(path.name for pattern in _PICKLES for path in directory.glob(pattern))
        if pickles:
            raise ValueError(
                f"{directory}: holds its weights as pickle ({pickles[0]}), which is not opened, since that runs the "
                "code in it. If you trust the file, load it with transformers and write it anew: "
                "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)."
            )
        raise ValueError(f"{directory}: holds neither {WEIGHTS_FILE} nor {INDEX_FILE}.")
    try:
        names = set(json.loads(index.read_bytes())["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{index}: is no index of a checkpoint ({error!r}).") from error
    if foreign := [name for name in names if not isinstance(name, str) or Path(name).name != name]:
        raise ValueError(f"{index}: names {foreign[0]!r}, which is no file of this directory.")
    if missing := sorted(name for name in names if not (directory / name).is_file()):
        raise ValueError(f"{index}: names {', '.join(missing)}, missing in {directory}. Download the checkpoint again.")
    return sorted(directory / name for name in names)


def _match(directory: Path, stored: Mapping[str, Stored], shape: LlamaConfig) -> dict[str, str]:
    """Name in the checkpoint -> our parameter, for every parameter of the model."""
    with torch.device("meta"):
        model = Llama(shape, strategy=STRATEGIES["full"], kernel="reference", rotary=RotaryConfig())
    wanted = {_hugging_face_name(name): name for name, _ in model.named_parameters()}
    shapes = {_hugging_face_name(name): tuple(p.shape) for name, p in model.named_parameters()}
    ignored = {name for name in stored if name.endswith("rotary_emb.inv_freq")}  # made anew: see modules/rotary.py
    if shape.tied_embeddings:
        ignored.add("lm_head.weight")
    broken = [f"missing {name} {list(shapes[name])}" for name in wanted if name not in stored]
    broken += [
        f"unexpected {name} {list(stored[name].shape)}" for name in stored if name not in wanted and name not in ignored
    ]
    broken += [
        f"{name} is {list(stored[name].shape)}, not {list(shapes[name])}"
        for name in wanted
        if name in stored and stored[name].shape != shapes[name]
    ]
    broken += [
        f"{name} is stored as {stored[name].dtype}, not as one of {', '.join(sorted(_DTYPES))}"
        for name in wanted
        if name in stored and stored[name].dtype not in _DTYPES
    ]
    if broken:
        raise ValueError(f"{directory}: the weights are not those that config.json describes: {'; '.join(broken)}.")
    return wanted


def _read(stored: Mapping[str, Stored], name: str) -> Tensor:
    from safetensors import safe_open

    with safe_open(stored[name].file, framework="pt") as tensors:
        tensor = tensors.get_tensor(name)
    assert isinstance(tensor, Tensor)
    return tensor


def _hugging_face_name(name: str) -> str:
    return name if name.startswith("lm_head.") else f"model.{name}"


def _shards(weights: Mapping[str, Tensor], limit: int) -> list[list[str]]:
    """Names by file, in order, each file as full as the limit allows."""
    return [names for names in _filled(weights, limit) if names]


def _filled(weights: Mapping[str, Tensor], limit: int) -> Iterator[list[str]]:
    names: list[str] = []
    size = 0
    for name, tensor in weights.items():
        if size + tensor.nbytes > limit:
            yield names
            names, size = [], 0
        names.append(name)
        size += tensor.nbytes
    yield names


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
