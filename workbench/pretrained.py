"""Where a pretrained checkpoint lies: a folder of this machine, or a name of the Hugging Face hub fetched once."""

import re
from functools import lru_cache
from pathlib import Path

from workbench.errors import UserError

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SMALL, _WEIGHTS = ["*.json", "tokenizer*"], ["model*.safetensors"]


def is_hub_name(spec: str) -> bool:
    """Whether a text looks like `organisation/name`."""
    return HUB_NAME.fullmatch(spec) is not None


def checkpoint_directory(spec: str, *, where: str = "model.checkpoint") -> Path:
    """The absolute folder of a checkpoint, downloaded if it is a hub's.

    Args:
        spec: a folder, or `organisation/name`; a folder wins.
        where: the setting or argument, for messages.
    Raises:
        UserError: no such folder, or the hub cannot be asked.
    """
    folder = Path(spec).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise UserError(
                f"{where}={spec!r}: the folder has no config.json. Give a Hugging Face checkpoint's folder."
            )
        return folder.absolute()
    if folder.exists():
        raise UserError(f"{where}={spec!r} is a file. Give the folder that holds config.json and *.safetensors.")
    if not is_hub_name(spec):
        raise UserError(f"{where}={spec!r}: there is no such folder, and it is no hub name (organisation/name) either.")
    return _from_hub(spec, where)


@lru_cache(maxsize=64)
def _from_hub(name: str, where: str) -> Path:
    """Settings first, so that another architecture is refused before its gigabytes arrive."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise UserError(
            f"{where}={name!r}: no folder of that name, and the hub needs the package huggingface_hub, which is not "
            "installed. Run `pip install huggingface_hub`, or give a folder."
        ) from error
    from modules.hf_weights import read_shape

    try:
        folder = Path(snapshot_download(name, allow_patterns=_SMALL))
    except Exception as error:  # the package raises its own, requests' and httpx's kinds
        raise UserError(_unreachable(name, where, error)) from error
    try:
        read_shape(folder)
    except ValueError as error:
        raise UserError(f"{where}={name!r}: {error}") from error
    try:
        return Path(snapshot_download(name, allow_patterns=[*_SMALL, *_WEIGHTS]))
    except Exception as error:
        raise UserError(_unreachable(name, where, error)) from error


def _unreachable(name: str, where: str, error: Exception) -> str:
    said = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return (
        f"{where}={name!r}: no folder of that name, and the hub gave no such model ({type(error).__name__}: {said}). "
        "Check the name, the network and, for a gated model, `hf auth login`; or give a folder."
    )
