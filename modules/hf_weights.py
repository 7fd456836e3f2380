"""Checkpoints in Hugging Face's form, read and written without transformers.

    config.json, model.safetensors   <->   Llama
    model.layers.0.self_attn.q_proj.weight   is   layers.0.self_attn.q_proj.weight   here

Source: `save_pretrained` of transformers 5: names, index and sizes of shards.
"""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from modules.attention.strategies import STRATEGIES
from modules.hf_config import json_of_shape, shape_of_json
from modules.hf_tensors import INDEX, SINGLE, StoredTensors, read_json_object, stored_tensors
from modules.llama import Llama, LlamaConfig
from modules.rotary import RotaryConfig

MAX_SHARD_BYTES = 5_000_000_000
"""Transformers' own "5GB"."""
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_NO_WEIGHTS = ("rotary_emb.inv_freq",)
"""Ends of names that older files hold and that follow from `config.json`."""
_KINDS = ("F64", "F32", "F16", "BF16")


def read_shape(directory: Path) -> LlamaConfig:
    """The shape that a checkpoint's `config.json` describes.

    Raises:
        ValueError: no such file, another architecture, or settings that are not supported; all at once.
    """
    path = directory / "config.json"
    try:
        return shape_of_json(read_json_object(path))
    except ValueError as error:
        lines = [line if line.startswith(str(path)) else f"{path}: {line}" for line in str(error).splitlines()]
        raise ValueError("\n".join(lines)) from error


@torch.no_grad()
def load_weights(model: Llama, directory: Path) -> None:
    """Fills a model with a checkpoint's weights, in the model's dtype, one tensor after the other.

    Parameters on the meta device come into being on the CPU, so that a model built there is in memory once.

    Raises:
        ValueError: files that cannot be read, or tensors that are missing, unexpected or of another shape: every one is
            named, and the model is not touched.
    """
    stored = stored_tensors(directory)
    check_names(model, stored, directory)
    for name, parameter in list(model.named_parameters()):
        value = stored.read(hugging_face_name(name))
        if parameter.is_meta:
            fresh = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
            fresh.copy_(value)
            _replace(model, name, nn.Parameter(fresh, requires_grad=parameter.requires_grad))
        else:
            parameter.copy_(value)


def check_weights(directory: Path, shape: LlamaConfig) -> None:
    """Holds a checkpoint's tensors to a shape, from the files' heads alone.

    Raises:
        ValueError: files that cannot be read, or what `check_names` finds.
    """
    with torch.device("meta"):
        model = Llama(shape, strategy=STRATEGIES["full"], kernel="reference", rotary=RotaryConfig())
    check_names(model, stored_tensors(directory), directory)


def check_names(model: Llama, stored: StoredTensors, directory: Path) -> None:
    """Holds a checkpoint's tensors to a model's, both ways.

    Raises:
        ValueError: tensors that are missing, unexpected or of another shape, every one with its name.
    """
    wanted = {hugging_face_name(name): tuple(parameter.shape) for name, parameter in model.named_parameters()}
    there = {name: shape for name, shape in stored.shapes.items() if not name.endswith(_NO_WEIGHTS)}
    broken = []
    if model.lm_head is None and _HEAD in there and _EMBEDDING in there:
        if not torch.equal(stored.read(_HEAD), stored.read(_EMBEDDING)):
            broken.append(
                f"different: {_HEAD} and {_EMBEDDING} are not equal, but config.json says tie_word_embeddings=true. "
                "Set that to false, or remove the head."
            )
        del there[_HEAD]
    broken += [f"missing: {name} {list(shape)}" for name, shape in wanted.items() if name not in there]
    broken += [f"unexpected: {name} {list(shape)}" for name, shape in there.items() if name not in wanted]
    broken += [
        f"of another shape: {name} is {list(there[name])} in the file and {list(shape)} by config.json"
        for name, shape in wanted.items()
        if name in there and there[name] != shape
    ]
    broken += [
        f"of another kind: {name} holds {stored.kinds[name]}, not floating-point numbers of 16 to 64 bits"
        for name in wanted
        if name in there and stored.kinds[name] not in _KINDS
    ]
    if broken:
        raise ValueError(
            f"{directory}: the weights do not fit config.json, in {len(broken)} tensors:\n  " + "\n  ".join(broken)
        )


def save_checkpoint(model: Llama, directory: Path, *, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
    """Writes a model as a checkpoint that transformers loads: theta, scaling and positions as they are in use.

    Args:
        model: weights are written in their own dtype.
        directory: is made; empty at most. A stopped write leaves nothing under this name.
        max_shard_bytes: from here on the weights are spread over several files.
    Raises:
        ValueError: the folder holds something, or no family of transformers computes this model.
    """
    with new_folder(directory) as folder:
        write_checkpoint(model, folder, max_shard_bytes=max_shard_bytes)


def write_checkpoint(
    model: Llama, folder: Path, *, extra: dict[str, Any] | None = None, max_shard_bytes: int = MAX_SHARD_BYTES
) -> None:
    """`save_checkpoint` into a folder that is there.

    Args:
        model: as there.
        folder: an empty one, such as `new_folder` makes.
        extra: more keys of `config.json`, such as the ids of special tokens.
        max_shard_bytes: as there.
    """
    from safetensors.torch import save_file

    dtype = str(model.embed_tokens.weight.dtype).removeprefix("torch.")
    config_json = json_of_shape(shape_in_use(model), dtype=dtype) | (extra or {})
    tensors = {hugging_face_name(name): parameter.detach() for name, parameter in model.named_parameters()}
    shards = _shards(tensors, max_shard_bytes)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        weight_map |= dict.fromkeys(names, file)
        save_file({name: tensors[name].contiguous() for name in names}, folder / file, metadata={"format": "pt"})
        (folder / file).chmod(0o644)  # the library makes it readable to its owner alone
    if len(shards) > 1:
        total = {"total_size": sum(_size(tensor) for tensor in tensors.values())}
        write_json_object(folder / INDEX, {"metadata": total, "weight_map": weight_map})
    write_json_object(folder / "config.json", config_json)


def shape_in_use(model: Llama) -> LlamaConfig:
    """A model's shape with the theta and scaling that it computes with."""
    return replace(model.config, rope_theta=float(model.theta), rope_scaling=model.scaling)


@contextmanager
def new_folder(directory: Path) -> Iterator[Path]:
    """A folder to fill that gets its name when all of it is written, and vanishes on an error.

    Raises:
        ValueError: something of that name is there.
    """
    check_new_folder(directory)
    directory = directory.absolute()
    directory.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(directory)
    partial = directory.with_name(f".{directory.name}.{os.getpid()}.partial")
    partial.mkdir()
    try:
        yield partial
        os.replace(partial, directory)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def check_new_folder(directory: Path) -> None:
    """What `new_folder` refuses, for those who have long work to do before they write.

    Raises:
        ValueError: something of that name is there.
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ValueError(f"{directory.absolute()}: exists and is not empty. Name a new folder.")


def _remove_leftovers(directory: Path) -> None:
    """What a killed write left behind."""
    for old in directory.parent.glob(f".{directory.name}.*.partial"):
        pid = old.name.removesuffix(".partial").rpartition(".")[2]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(old, ignore_errors=True)


def write_json_object(path: Path, value: dict[str, Any]) -> None:
    """JSON with two spaces, as transformers writes it."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def hugging_face_name(name: str) -> str:
    """A parameter's name in a checkpoint."""
    return name if name == _HEAD else f"model.{name}"


def _shards(tensors: dict[str, Tensor], max_bytes: int) -> list[list[str]]:
    """Names in order, cut where the next one would not fit; a larger tensor stands alone."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, tensor in tensors.items():
        if shards[-1] and filled + _size(tensor) > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += _size(tensor)
    return shards


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _replace(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    owner, _, last = name.rpartition(".")
    setattr(model.get_submodule(owner), last, parameter)
