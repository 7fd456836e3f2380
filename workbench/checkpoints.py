"""Checkpoint files of a run's folder: named by step, written whole, read without unpickling code."""

import re
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor, nn


def checkpoint_step(path: Path) -> int | None:
    """Optimizer steps behind a checkpoint, from its name step=120.ckpt; None for another name."""
    match = re.fullmatch(r"step=(\d+)(-v\d+)?\.ckpt", path.name)
    return int(match[1]) if match else None


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run's folder, by rising step."""
    found = {path: checkpoint_step(path) for path in (folder / "checkpoints").glob("step=*.ckpt")}
    return sorted((path for path, step in found.items() if step is not None), key=lambda path: found[path] or 0)


def newest_checkpoint(folder: Path) -> Path | None:
    """The checkpoint of a run's folder with the most steps."""
    return next(reversed(checkpoints(folder)), None)


def read_state(path: Path, *, device: str | None = None, mmap: bool = False) -> "dict[str, Tensor]":
    """A checkpoint's parameters by name.

    Args:
        path: the file.
        device: `meta` for shapes alone.
        mmap: tensors stay in the file until they are read.
    Raises:
        UserError: the file cannot be read.
    """
    import torch

    try:
        state: dict[str, Tensor] = torch.load(path, map_location=device, mmap=mmap, weights_only=True)["state_dict"]
    except Exception as error:  # torch raises many kinds for a broken or foreign file
        raise UserError(f"{path}: is no checkpoint that can be read: {error}") from error
    return state


def check_checkpoint(path: Path, module: "nn.Module") -> None:
    """Holds a checkpoint's weights to the model's shapes before anything is loaded.

    Raises:
        UserError: the file cannot be read, or holds a model of another shape.
    """
    saved = read_state(path, device="meta")
    own = module.state_dict()
    for name in [*own, *(name for name in saved if name not in own)]:
        there, here = saved.get(name), own.get(name)
        if there is None or here is None or there.shape != here.shape:
            raise UserError(
                f"{path}: holds a model of another shape: {name} is {_shape(there)} there and {_shape(here)} in this "
                "config. Resume with the config that the run was started with, or start a new run without --resume."
            )


def _shape(tensor: "Tensor | None") -> str:
    return "missing" if tensor is None else str(list(tensor.shape))
