"""Checkpoints are written whole or not at all, beside their place and then renamed.

Lightning 2.6 writes into the system's temporary folder and moves the file from there: across file systems that is a
copy, and a kill in its middle leaves half a file under the final name, which a resume would then pick as the newest.
"""

import os
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO


class WholeCheckpoints(TorchCheckpointIO):
    """Lightning's plain checkpoint files, written so that a kill or a full disk leaves the previous one untouched."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Writes one file. An error while writing leaves nothing behind and is raised."""
        if storage_options is not None:
            raise TypeError("checkpoints are local files: there are no storage options")
        place = Path(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        temporary = place.with_name(f".{place.name}.{os.getpid()}")
        try:
            with temporary.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, place)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def remove_leftovers(folder: Path) -> None:
    """Removes what a killed process was in the middle of writing. Only for a folder that nobody writes to."""
    for file in (folder / "checkpoints").glob(".*.ckpt.*"):
        file.unlink(missing_ok=True)
