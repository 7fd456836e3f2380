"""A model that the command line names: a checkpoint directory, a preset, an MLflow run, or a name on the hub."""

import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import yaml

from datamodules.tokenizers import BYTE, load_tokenizer
from modules.attention.strategies import STRATEGIES
from modules.hf_config import read_shape
from modules.hf_weights import check_weights, load_weights
from modules.llama import Llama, LlamaConfig
from modules.presets import PRESETS, ModelConfig
from modules.rotary import RotaryConfig
from workbench import build
from workbench.checkpoints import checkpoint_step, checkpoints, newest_checkpoint, read_state
from workbench.config import RunConfig, resolve
from workbench.errors import UserError, user_input
from workbench.home import trial_folder
from workbench.pretrained import TOKENIZER_FILE, checkpoint_directory, is_hub_name
from workbench.tracking import existing_client, tag

if TYPE_CHECKING:
    from mlflow.entities import Run


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """A model that is known to be there and whole; its weights are read by `load`."""

    name: str
    """As asked for."""
    kind: Literal["checkpoint", "hub", "preset", "run"]
    shape: LlamaConfig
    """Theta and scaling are those the model was trained with."""
    tokenizer: str
    """What `load_tokenizer` takes: a file, or `byte`."""
    directory: Path | None = None
    """Of a Hugging Face checkpoint."""
    checkpoint: Path | None = None
    """Of a run: its newest."""
    config: RunConfig | None = None
    """Of a run."""

    @property
    def short_name(self) -> str:
        """For titles: a directory's last part, else as asked for."""
        return Path(self.name).expanduser().absolute().name if self.kind == "checkpoint" else self.name

    def load(self, dtype: torch.dtype, *, device: str = "cpu", random: bool = False, seed: int = 0) -> Llama:
        """The model in evaluation mode, with full causal attention and its own frequencies, rotated in float32.

        Args:
            dtype: of the weights; those that are stored otherwise are rounded.
            device: where it goes.
            random: weights drawn from the seed instead. A preset has no others.
            seed: of random weights, the same in every dtype but for rounding.
        Raises:
            UserError: weights that cannot be read.
        """
        with torch.device("meta"):
            model = Llama(self.shape, strategy=STRATEGIES["full"], kernel="auto", rotary=RotaryConfig()).to(dtype)
        model.to_empty(device=device)
        with user_input():
            if random or self.kind == "preset":
                torch.manual_seed(seed)
                model.reset_parameters()
            elif self.checkpoint is not None:
                model.load_state_dict(model_state(self.checkpoint))
            else:
                assert self.directory is not None
                load_weights(model, self.directory)
        return model.eval().requires_grad_(False)


def find_model(spec: str, home: Path) -> ModelSource:
    """What the name stands for: a directory, else a preset, else a run's id, else a model of the hub.

    Raises:
        UserError: nothing of that name, or a model that cannot be read.
    """
    with user_input():
        if Path(spec).expanduser().is_dir():
            return _of_directory(spec, "checkpoint")
        if spec in PRESETS:
            shape = ModelConfig(preset=spec).resolve(load_tokenizer(BYTE).vocabulary_size)
            return ModelSource(name=spec, kind="preset", shape=shape, tokenizer=BYTE)
        if re.fullmatch(r"[0-9a-f]{32}", spec):
            return _of_run(spec, home)
        if is_hub_name(spec):
            return _of_directory(spec, "hub")
    raise UserError(
        f"{spec!r} is no checkpoint directory, no preset ({', '.join(PRESETS)}), no MLflow run's id (32 hexadecimal "
        "digits) and no model of the hub (org/name)."
    )


def run_of(run_id: str, home: Path) -> "tuple[Run, RunConfig]":
    """An MLflow run that trained a model, and its config.

    Raises:
        UserError: no such run, a run of another kind, or one that ended before its config was written.
    """
    from mlflow.exceptions import MlflowException

    client = existing_client(home)
    if client is None:
        raise UserError(f"{run_id}: there is no MLflow store in {home} yet.")
    try:
        run = client.get_run(run_id)
    except MlflowException as error:
        raise UserError(f"{run_id}: no such run in {home}.") from error
    if tag(run, "kind") not in ("fit", "trial"):
        raise UserError(
            f"{run_id}: is a {tag(run, 'kind') or 'foreign'} run, which has no model. Name one that trained: "
            "`workbench ui` shows a sweep's cells under it."
        )
    with tempfile.TemporaryDirectory() as folder:
        try:
            file = client.download_artifacts(run_id, "config.yaml", folder)
            config: dict[str, Any] = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
        except (MlflowException, OSError) as error:
            raise UserError(f"{run_id}: ended before its config was written ({tag(run, 'reason')}).") from error
    return run, resolve((f"config.yaml of run {run_id}", config))


def checkpoint_of(run_id: str, home: Path, step: int | None = None) -> Path:
    """A run's checkpoint of that step, or the newest.

    Raises:
        UserError: it has none.
    """
    folder = trial_folder(home, run_id)
    found = checkpoints(folder)
    chosen = newest_checkpoint(folder) if step is None else next((p for p in found if checkpoint_step(p) == step), None)
    if chosen is None:
        there = ", ".join(str(checkpoint_step(path)) for path in found)
        wanted = "" if step is None else f" of step {step}"
        raise UserError(
            f"{run_id}: has no checkpoint{wanted} in {folder / 'checkpoints'}"
            + (f"; it has {there}." if there else ". Set trainer.checkpoint_every, or let the run finish.")
        )
    return chosen


def model_state(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The model's weights in a run's checkpoint, by the model's own names; mapped from the file, not read yet.

    Raises:
        UserError: the file is broken.
    """
    state = read_state(checkpoint, mmap=True)
    return {name.removeprefix("model."): tensor for name, tensor in state.items() if name.startswith("model.")}


def _of_directory(spec: str, kind: Literal["checkpoint", "hub"]) -> ModelSource:
    directory = checkpoint_directory(spec)
    shape = read_shape(directory)
    check_weights(directory, shape)
    tokenizer = directory / TOKENIZER_FILE
    return ModelSource(
        name=spec, kind=kind, shape=shape, directory=directory,
        tokenizer=str(tokenizer) if tokenizer.is_file() else "",
    )  # fmt: skip


def _of_run(run_id: str, home: Path) -> ModelSource:
    _, config = run_of(run_id, home)
    base = checkpoint_directory(config.model.checkpoint) if config.model.checkpoint else None
    tokenizer = build.tokenizer_of(config, base)
    shape = build.shape_of(config, base, tokenizer.vocabulary_size)
    spec = config.data.tokenizer or (str(base / TOKENIZER_FILE) if base else BYTE)
    return ModelSource(
        name=run_id, kind="run", shape=shape, tokenizer=spec, checkpoint=checkpoint_of(run_id, home), config=config
    )
