"""One run of the store, found by what a user calls it, and what it trained: its config, shape and checkpoints."""

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modules.llama import LlamaConfig
from modules.rotary_scaling import ScalingConfig
from workbench.checkpoints import checkpoint_step
from workbench.config import RunConfig, read_yaml, resolve
from workbench.errors import UserError, user_input
from workbench.home import trial_folder
from workbench.tracking import existing_client, tag

if TYPE_CHECKING:
    from mlflow.entities import Run
    from torch import Tensor

SHAPE = "shape.json"
"""Artifact with the shape that a run trains: its config alone may point to a checkpoint that moves away."""


def find_run(home: Path, spec: str) -> "Run | None":
    """The run with this id or this name; None where there is none.

    Raises:
        UserError: several runs have that name, or the one found is a sweep's parent, which trains nothing itself.
    """
    from mlflow.exceptions import MlflowException

    client = existing_client(home)
    if client is None:
        return None
    if re.fullmatch(r"[0-9a-f]{32}", spec):
        try:
            found = [client.get_run(spec)]
        except MlflowException:
            return None
    else:
        ids = [experiment.experiment_id for experiment in client.search_experiments()]
        if "'" in spec:  # MLflow's search cannot ask for it
            return None
        named = f"attributes.run_name = '{spec}'"
        found = list(client.search_runs(ids, named, order_by=["attributes.start_time DESC"], max_results=1000))
    found = [run for run in found if run.info.lifecycle_stage == "active"]
    if len(found) > 1:
        ids = [run.info.run_id for run in found]
        raise UserError(
            f"{spec!r} is the name of {len(ids)} runs in {home}. Give an id, newest first: {', '.join(ids[:5])}."
        )
    if found and tag(found[0], "kind") == "sweep":
        raise UserError(f"{spec!r} is a sweep, which has no weights of its own. Give the id of one of its trials.")
    return found[0] if found else None


def run_config(home: Path, run: "Run") -> RunConfig:
    """The config that a run was started with."""
    return resolve(("", read_yaml(_artifact(home, run, "config.yaml"))))


def run_shape(home: Path, run: "Run") -> LlamaConfig:
    """The shape that a run trains, theta and scaling included."""
    with user_input(f"run {run.info.run_id}"):
        return shape_of_dict(json.loads(_artifact(home, run, SHAPE).read_text(encoding="utf-8")))


def shape_to_dict(shape: LlamaConfig) -> dict[str, Any]:
    """JSON-ready; loads back equal."""
    return asdict(shape)


def shape_of_dict(written: dict[str, Any]) -> LlamaConfig:
    """The shape behind `shape_to_dict`."""
    return LlamaConfig(**{**written, "rope_scaling": ScalingConfig(**written["rope_scaling"])})


def run_checkpoint(home: Path, run: "Run", step: int | None = None) -> Path:
    """A run's checkpoint: the newest, or that of a step.

    Raises:
        UserError: there is none; those that are there are listed.
    """
    run_id = run.info.run_id
    folder = trial_folder(home, run_id) / "checkpoints"
    found = {number: path for path in sorted(folder.glob("*.ckpt")) if (number := checkpoint_step(path)) is not None}
    if not found:
        raise UserError(
            f"run {run_id} has no checkpoint in {folder}. One is written after the last step, and every "
            "trainer.checkpoint_every steps."
        )
    if step is None:
        step = max(found)
    if step not in found:
        there = ", ".join(str(number) for number in sorted(found))
        raise UserError(f"run {run_id} has no checkpoint of step {step}. It has those of step {there}.")
    return found[step]


def checkpoint_weights(path: Path) -> "dict[str, Tensor]":
    """A run's weights by the model's own names, mapped and not yet in memory.

    Raises:
        UserError: the file cannot be read.
    """
    import torch

    try:
        saved = torch.load(path, map_location="cpu", mmap=True, weights_only=True)["state_dict"]
    except Exception as error:  # torch raises many kinds for a broken or foreign file
        raise UserError(f"{path}: is no checkpoint that can be read: {error}") from error
    return {name.removeprefix("model."): value for name, value in saved.items() if name.startswith("model.")}


def _artifact(home: Path, run: "Run", name: str) -> Path:
    from mlflow.exceptions import MlflowException

    client = existing_client(home)
    assert client is not None, "the run was found in it"
    try:
        return Path(client.download_artifacts(run.info.run_id, name))
    except (MlflowException, OSError) as error:
        raise UserError(
            f"run {run.info.run_id} has no {name}: it ended before it began to train, or an earlier version made it. "
            "Run it again."
        ) from error
