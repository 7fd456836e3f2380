"""A run's checkpoint as a Hugging Face directory: `workbench export RUN DIR [--step N]`.

config.json              the trained theta, scaling and positions; ids of BOS and EOS
model.safetensors        weights in the dtype they were trained in
tokenizer.json, tokenizer_config.json   a BOS in front where training put one
generation_config.json   ids of BOS and EOS
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from datamodules.tokenizers import SavedTokenizer, Tokenizer, load_tokenizer
from modules.attention.strategies import STRATEGIES
from modules.hf_weights import new_folder, write_checkpoint, write_json_object
from modules.llama import Llama
from modules.rotary import RotaryConfig
from workbench.errors import UserError, user_input
from workbench.model_source import fill_from_run
from workbench.runs import checkpoint_weights, find_run, run_checkpoint, run_config, run_shape
from workbench.tokenizer_files import BYTE_SPECIALS, byte_tokenizer, write_tokenizer_files

if TYPE_CHECKING:
    from mlflow.entities import Run

_KEPT = ("unk_token", "pad_token", "chat_template")
"""Keys of the tokenizer's own `tokenizer_config.json` that go with it."""


def export(spec: str, directory: Path, *, home: Path, step: int | None = None) -> Path:
    """Writes a run's weights with all that transformers needs to use them.

    Args:
        spec: id or unique name of a run.
        directory: a new folder.
        home: where runs live.
        step: which checkpoint; None is the newest.
    Returns:
        The checkpoint that was written out.
    Raises:
        UserError: no such run or step, a tokenizer that is gone or changed, or a folder that holds something.
    """
    run = find_run(home, spec)
    if run is None:
        raise UserError(f"{spec!r}: no run of {home} has this id or name. `workbench ui` shows them.")
    checkpoint = run_checkpoint(home, run, step)
    shape = run_shape(home, run)
    tokenizer, source = _tokenizer(home, run)
    with torch.device("meta"):
        model = Llama(shape, strategy=STRATEGIES["full"], kernel="reference", rotary=RotaryConfig())
    model = model.to(_trained_dtype(checkpoint))
    fill_from_run(model, checkpoint)
    ids = {"bos_token_id": tokenizer.anchor_id, "eos_token_id": tokenizer.end_id}
    with user_input(), new_folder(directory) as folder:
        write_checkpoint(model, folder, extra=ids)
        write_json_object(folder / "generation_config.json", {k: v for k, v in ids.items() if v is not None})
        adds_bos = run.data.params["resolved.anchor"] != "none"
        _write_tokenizer(folder, tokenizer, source, adds_bos=adds_bos, max_positions=shape.max_positions)
    return checkpoint


def _trained_dtype(checkpoint: Path) -> torch.dtype:
    return next(iter(checkpoint_weights(checkpoint).values())).dtype


def _tokenizer(home: Path, run: "Run") -> tuple[Tokenizer, Path | None]:
    """The run's tokenizer and its file, which must be the one that trained."""
    data, params = run_config(home, run).data, run.data.params
    spec = params.get("resolved.tokenizer", data.tokenizer)
    with user_input(f"run {run.info.run_id}"):
        tokenizer = load_tokenizer(spec, data.anchor_token, data.end_of_document)
    if tokenizer.digest != params.get("resolved.tokenizer_digest"):
        raise UserError(
            f"run {run.info.run_id}: {spec} is no longer the tokenizer that it was trained with. "
            "Bring the old one back."
        )
    if spec == "byte":
        return tokenizer, None
    file = Path(spec)
    return tokenizer, file / "tokenizer.json" if file.is_dir() else file


def _write_tokenizer(
    folder: Path, tokenizer: Tokenizer, source: Path | None, *, adds_bos: bool, max_positions: int
) -> None:
    extra: dict[str, Any] = {}
    if source is None:
        written, (bos, eos) = byte_tokenizer(), BYTE_SPECIALS
        end: str | None = eos if tokenizer.end_id is not None else None
    else:
        assert isinstance(tokenizer, SavedTokenizer)
        written = json.loads(source.read_bytes()) | {"truncation": None, "padding": None}
        bos = tokenizer.backend.id_to_token(tokenizer.anchor_id)
        end = None if tokenizer.end_id is None else tokenizer.backend.id_to_token(tokenizer.end_id)
        beside = source.parent / "tokenizer_config.json"
        own = json.loads(beside.read_bytes()) if beside.is_file() else {}
        extra = {key: own[key] for key in _KEPT if key in own}
    write_tokenizer_files(
        folder, written, bos=bos, eos=end, adds_bos=adds_bos, max_positions=max_positions, extra=extra
    )
