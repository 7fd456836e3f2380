"""A model by whatever a user calls it: a checkpoint's folder, a hub name, a preset, or a run.

Source of each kind's weights: safetensors; the seed; the newest checkpoint of the run's folder.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

from modules.attention.strategies import STRATEGIES, Strategy
from modules.hf_weights import check_weights, load_weights, read_shape
from modules.llama import Llama, LlamaConfig
from modules.presets import PRESETS, ModelConfig
from modules.rotary import RotaryConfig
from workbench.errors import UserError, user_input
from workbench.pretrained import checkpoint_directory, is_hub_name
from workbench.runs import checkpoint_weights, find_run, run_checkpoint, run_shape

if TYPE_CHECKING:
    from mlflow.entities import Run

Kind = Literal["checkpoint", "hub", "preset", "run"]
_BYTES = 258
"""Vocabulary of the presets that take the tokenizer's: the byte tokenizer's."""


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """A model that is known to be there; its weights are read by `load`."""

    name: str
    """As asked for."""
    kind: Kind
    shape: LlamaConfig
    """Theta and scaling are those it was trained with."""
    tokenizer: str | None
    """`byte` or a path, as `load_tokenizer` takes it. None: none lies beside the checkpoint."""
    weights: Path | None
    """Folder of a checkpoint, or a run's checkpoint file; None for a preset."""

    @property
    def short_name(self) -> str:
        """For titles: a folder's last part, else as asked for."""
        return Path(self.name).expanduser().absolute().name if self.kind == "checkpoint" else self.name

    def load(
        self,
        *,
        strategy: Strategy = STRATEGIES["full"],
        kernel: str = "sdpa",
        rotary: RotaryConfig | None = None,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        random: bool = False,
    ) -> Llama:
        """The model on the CPU, its weights in memory once.

        Args:
            strategy: which keys each query may see.
            kernel: what computes attention.
            rotary: theta and scaling instead of the model's own, and the rounding policy. None: the model's own,
                float32.
            dtype: of the weights.
            seed: of random weights; in every dtype the same but for rounding.
            random: random weights in place of its own. A preset has no others.
        Raises:
            UserError: its files cannot be used.
        """
        with user_input(self.name), torch.device("meta"):
            model = Llama(self.shape, strategy=strategy, kernel=kernel, rotary=rotary or RotaryConfig()).to(dtype)
        if self.weights is None or random:
            torch.manual_seed(seed)
            model.to_empty(device="cpu").reset_parameters()
        elif self.kind == "run":
            fill_from_run(model, self.weights)
        else:
            with user_input():
                load_weights(model, self.weights)
        return model


def find_model(spec: str, *, home: Path) -> ModelSource:
    """The model that `spec` names: folder of a checkpoint, preset, id or unique name of a run, or hub name.

    Raises:
        UserError: nothing or more than one thing has that name, or its files cannot be used.
    """
    kind, found = resolve_spec(spec, home=home)
    weights = None if found is None else found if isinstance(found, Path) else run_checkpoint(home, found)
    return ModelSource(
        name=spec, kind=kind, shape=_shape(spec, found, home), tokenizer=_tokenizer(found), weights=weights
    )


def resolve_spec(spec: str, *, home: Path) -> "tuple[Kind, Path | Run | None]":
    """What a text names: its kind, and the folder or run.

    Raises:
        UserError: nothing or more than one thing has that name, with what was tried.
    """
    if Path(spec).expanduser().exists():
        if spec in PRESETS:
            raise UserError(f"{spec!r} is a preset and a folder. Write ./{spec} for the folder, or rename it.")
        return "checkpoint", checkpoint_directory(spec, where="model")
    run = find_run(home, spec)
    if spec in PRESETS:
        if run is not None:
            raise UserError(f"{spec!r} is a preset and the name of run {run.info.run_id}. Give the run's id.")
        return "preset", None
    if run is not None:
        return "run", run
    if is_hub_name(spec):
        return "hub", checkpoint_directory(spec, where="model")
    raise UserError(
        f"{spec!r} names no model: no folder here, no preset ({', '.join(PRESETS)}), no run of {home} by id or name, "
        "and no hub name (organisation/name)."
    )


@torch.no_grad()
def fill_from_run(model: Llama, checkpoint: Path) -> None:
    """Fills a model, on the meta device or not, with a run's weights in the model's dtype, one after the other.

    Raises:
        UserError: the file cannot be read, or holds another model.
    """
    weights = checkpoint_weights(checkpoint)
    wanted = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    there = {name: tuple(value.shape) for name, value in weights.items()}
    if wanted != there:
        odd = sorted(name for name in wanted | there if wanted.get(name) != there.get(name))
        raise UserError(f"{checkpoint}: holds another model than its run says: {', '.join(odd[:8])}.")
    for name, parameter in list(model.named_parameters()):
        fresh = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu").copy_(weights[name])
        owner, _, last = name.rpartition(".")
        setattr(model.get_submodule(owner), last, nn.Parameter(fresh))


def _shape(spec: str, found: "Path | Run | None", home: Path) -> LlamaConfig:
    if found is None:
        return ModelConfig(preset=spec).resolve(_BYTES)
    if isinstance(found, Path):
        with user_input():
            shape = read_shape(found)
            check_weights(found, shape)
        return shape
    return run_shape(home, found)


def _tokenizer(found: "Path | Run | None") -> str | None:
    if found is None:
        return "byte"
    if isinstance(found, Path):
        file = found / "tokenizer.json"
        return str(file) if file.is_file() else None
    return found.data.params.get("resolved.tokenizer")
