"""`workbench probe MODEL`: from a model's name to tables, figures and an MLflow run."""

import sys
from typing import Any

from rich.console import Console
from rich.progress import Progress

from datamodules.tokenizers import load_tokenizer
from workbench.errors import UserError, user_input
from workbench.home import writable_home
from workbench.model_source import ModelSource, find_model
from workbench.probe.measure import Probe, check_memory
from workbench.probe.record import EXPERIMENT, record, recorded
from workbench.probe.sequences import read_sequences
from workbench.probe.settings import ProbeSettings
from workbench.tracking import Tracker


def probe(model: str, settings: ProbeSettings) -> dict[str, Any]:
    """Measures, draws and records; returns the JSON document.

    Args:
        model: what `find_model` takes.
        settings: everything else.
    Raises:
        UserError: model, corpus or settings that cannot work. Nothing is written then.
    """
    import torch

    if settings.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch finds no CUDA device here. Leave it out.")
    home = writable_home()
    source = find_model(model, home=home)
    if settings.random_weights and source.kind == "preset":  # it has no others
        from dataclasses import replace

        settings = replace(settings, random_weights=False)
    check_memory(settings, source.shape)
    with user_input():
        tokenizer = load_tokenizer(_tokenizer(source, settings))
    if tokenizer.vocabulary_size > source.shape.vocabulary_size:
        raise UserError(
            f"--tokenizer: has {tokenizer.vocabulary_size} tokens, but the model {source.shape.vocabulary_size}. "
            "Name the one that the model was trained with."
        )
    sequence_NT = read_sequences(
        settings.corpus, tokenizer, tokens=settings.tokens, sequences=settings.sequences, seed=settings.seed
    )
    work = Probe(
        settings,
        lambda condition: source.load(
            dtype=condition.torch_dtype, random=condition.weights == "random", seed=settings.seed
        ).to(settings.device),
        sequence_NT,
        anchor_id=tokenizer.anchor_id,
    )
    # To standard error: standard output is for the tables or the JSON document alone.
    console = Console(stderr=True)
    with recorded(Tracker(home, EXPERIMENT), source.short_name, settings, _facts(source, work)) as (tracker, run_id):
        with Progress(console=console, disable=not sys.stderr.isatty(), transient=True) as progress:
            task = progress.add_task("probing", total=work.passes * source.shape.layers)

            def estimated(seconds: float) -> None:
                conditions = sum(map(len, work.groups.values()))
                console.print(
                    f"{conditions} conditions x {settings.sequences} sequences x {1 + len(settings.shifts)} shifts: "
                    f"about {_duration(seconds)}.",
                    highlight=False,
                )

            results = work.run(on_layer=lambda: progress.advance(task), on_estimate=estimated)
        document = record(tracker, run_id, source, settings, results)
    console.print(f"Figures and tables: run {run_id} of experiment {EXPERIMENT}, `workbench ui`.", highlight=False)
    return document


def _tokenizer(source: ModelSource, settings: ProbeSettings) -> str:
    chosen = settings.tokenizer or source.tokenizer
    if chosen is None:
        raise UserError(f"{source.name}: has no tokenizer.json beside its weights. Name one by --tokenizer.")
    return chosen


def _facts(source: ModelSource, work: Probe) -> dict[str, Any]:
    shape = source.shape
    return {
        "model_source": source.name,
        "model_kind": source.kind,
        "layers": shape.layers,
        "heads": shape.heads,
        "head_width": shape.head_width,
        "rope_theta": shape.rope_theta,
        "rope_type": shape.rope_scaling.rope_type,
        "max_positions": shape.max_positions,
        "conditions": [condition.label for group in work.groups.values() for condition in group],
    }


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{max(1, round(seconds))} seconds"
    return f"{round(seconds / 60)} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"
