"""Checkpoint directories of Hugging Face: found by path or hub name, told apart by content."""

import hashlib
import re
from functools import cache
from pathlib import Path

TOKENIZER_FILE = "tokenizer.json"
_HUB_NAME = r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*"
_WANTED = ["config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json", "tokenizer*.json",
           "special_tokens_map.json"]  # fmt: skip
"""Never a pickle, never code."""


def is_hub_name(spec: str) -> bool:
    """Whether it has the form org/name and is no path that exists."""
    return re.fullmatch(_HUB_NAME, spec) is not None and not Path(spec).expanduser().exists()


def checkpoint_directory(spec: str) -> Path:
    """The directory of a checkpoint; a model of the hub is downloaded into the hub library's own cache.

    Raises:
        ValueError: no such directory, or a model that cannot be had.
    """
    directory = Path(spec).expanduser()
    if directory.is_dir():
        return directory
    if not is_hub_name(spec):
        what = "is a file, not a directory" if directory.exists() else "there is no such directory"
        raise ValueError(f"{spec}: {what}. Name a checkpoint directory, or a model of the hub as org/name.")
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ValueError(f"{spec}: downloading from the hub needs huggingface_hub: pip install it.") from error
    try:
        return Path(snapshot_download(spec, allow_patterns=_WANTED))
    except Exception as error:  # the library raises many kinds: offline, no such model, no permission
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(
            f"{spec}: there is no such directory here, and the hub does not give a model of that name: {lines[0]}"
        ) from error


def checkpoint_digest(directory: Path) -> str:
    """Hash of the configuration and of all weights; reads them all, once for as long as no file changes."""
    files = [directory / "config.json", *sorted(directory.glob("*.safetensors"))]
    digest = hashlib.sha256()
    for file in files:
        status = file.stat()
        digest.update(f"{file.name} {_file_digest(file, status.st_size, status.st_mtime_ns)}\n".encode())
    return digest.hexdigest()[:16]


@cache
def _file_digest(file: Path, size: int, changed_ns: int) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
