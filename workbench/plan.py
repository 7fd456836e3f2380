"""What a sweep will do, decided before anything starts: each cell's config, identity, state and size.

The dry run prints this plan and the real run executes it, so the plan cannot lie.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from datamodules.corpus import Corpus, file_digests
from datamodules.sources.config import SourceConfig
from modules.flops import training_flops
from modules.llama import parameter_count
from workbench import build
from workbench.cells import Cell
from workbench.checkpoints import newest_checkpoint
from workbench.config import RunConfig, resolve
from workbench.errors import UserError, user_input
from workbench.home import trial_folder
from workbench.identity import Identity, identity
from workbench.outcome import GOES_ON
from workbench.sweep_file import Sweep, accumulation
from workbench.tracking import Tracker, tag

if TYPE_CHECKING:
    from mlflow.entities import Run

DataKey = tuple[str, str]
"""The settings of all sources and the tokenizer's digest: what token stores are made of."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """What a trial costs."""

    parameter_count: int
    tokens_per_step: int
    visible_pair_share: float | None
    """None where the corpus is not tokenised yet."""
    flops: int | None
    """Of the whole training."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A cell with everything decided."""

    cell: Cell
    resolved: build.Resolved
    identity: Identity
    size: Size
    state: str
    """new, done, stale, failed or resume."""
    why: str
    run_id: str | None
    """The MLflow run to go on with, or the finished one."""

    @property
    def to_do(self) -> bool:
        """Whether a run of the sweep trains it."""
        return self.state != "done"

    def started_anew(self) -> "Trial":
        """The same trial in a run of its own."""
        return replace(self, run_id=None)

    def to_json(self) -> dict[str, Any]:
        """The documented row of `sweep --dry-run --json`."""
        return {
            "name": self.cell.name,
            "seed": self.cell.seed,
            "state": self.state,
            "why": self.why,
            "hash": self.identity.trial,
            "overrides": self.cell.axes,
            "parameter_count": self.size.parameter_count,
            "tokens_per_step": self.size.tokens_per_step,
            "visible_pair_share": self.size.visible_pair_share,
            "flops": self.size.flops,
            "memory_bytes": None,
            "seconds": None,
            "guess": None,
        }


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All cells of a sweep."""

    trials: list[Trial]
    excluded: list[Cell]

    @property
    def experiment(self) -> str:
        """The MLflow experiment of all trials."""
        return self.trials[0].resolved.config.tracking.experiment

    def to_json(self) -> dict[str, Any]:
        """The document that `sweep --dry-run --json` prints."""
        nothing = dict.fromkeys(self.trials[0].to_json())
        excluded = [
            {
                **nothing,
                "name": cell.name,
                "seed": cell.seed,
                "state": "excluded",
                "why": cell.excluded_why,
                "overrides": cell.axes,
            }
            for cell in self.excluded
        ]
        return {"cells": [trial.to_json() for trial in self.trials] + excluded}


def plan(sweep: Sweep, overrides: Mapping[str, Any], *, home: Path, tokenise: bool, ignore_code: bool = False) -> Plan:
    """Decides every cell of a sweep.

    Args:
        sweep: the file.
        overrides: dotted keys from the command line, above the cells.
        home: where token stores and runs are.
        tokenise: build missing token stores (a dry run does not).
        ignore_code: keep finished trials of other code.
    Raises:
        UserError: every mistake of every cell, each said once.
    """
    for key in overrides:
        if key in sweep.axis_keys or key == "seed":
            raise UserError(
                f"{key} is an axis of {sweep.path}, so it cannot be set on the command line. Edit the file."
            )
    if sweep.tokens_per_step is not None and "trainer.accumulate" in overrides:
        raise UserError(f"hold.tokens_per_step of {sweep.path} sets trainer.accumulate. Remove one of them.")
    problems: list[str] = []
    decided: list[tuple[Cell, build.Resolved]] = []
    cells = list(sweep.cells())
    for cell in cells:
        if cell.excluded_why is not None:
            continue
        try:
            decided.append((cell, build.check(_config(sweep, cell, overrides))))
        except UserError as error:
            problems.extend(f"cell {cell.name}: {line}" for line in str(error).splitlines())
    if problems:
        raise UserError("\n".join(_said_once(problems)))

    experiments = {resolved.config.tracking.experiment for _, resolved in decided}
    if len(experiments) > 1:
        raise UserError("tracking.experiment differs between cells. A sweep lives in one experiment.")
    stores = _open_stores([resolved for _, resolved in decided], home, tokenise=tokenise)
    children = _children(home, experiments.pop(), sweep.name)
    trials = []
    for cell, resolved in decided:
        data_digest, corpus = stores[_data_key(resolved)]
        known = identity(
            resolved.config,
            data_digest=data_digest,
            device_type=resolved.device_type,
            checkpoint_digest=resolved.checkpoint_digest,
        )
        state, why, run_id = _state(cell, known, children, home, ignore_code=ignore_code)
        trials.append(
            Trial(
                cell=cell,
                resolved=resolved,
                identity=known,
                size=_size(resolved, corpus),
                state=state,
                why=why,
                run_id=run_id,
            )
        )
    same_work: dict[str, list[str]] = {}
    for trial in trials:
        same_work.setdefault(trial.identity.trial, []).append(trial.cell.name)
    problems = [f"the cells {' and '.join(names)} are the same work." for names in same_work.values() if len(names) > 1]
    if problems:
        raise UserError("\n".join(f"{sweep.path}: {problem} Remove what does not differ." for problem in problems))
    return Plan(trials=trials, excluded=[cell for cell in cells if cell.excluded_why is not None])


def _config(sweep: Sweep, cell: Cell, overrides: Mapping[str, Any]) -> RunConfig:
    layers = [
        *sweep.base,
        ("", {**cell.axes, "seed": cell.seed, "name": cell.name}),
        (f"{sweep.path}: rules", cell.settings),
        ("command line", overrides),
    ]
    config = resolve(*layers)
    if sweep.tokens_per_step is None:
        return config
    per_batch = config.tokens_per_step // config.trainer.accumulate
    try:
        accumulate = accumulation(sweep.tokens_per_step, tokens_per_batch=per_batch)
    except ValueError as error:
        raise UserError(f"{sweep.path}: {error}") from error
    return replace(config, trainer=replace(config.trainer, accumulate=accumulate))


def _said_once(problems: list[str]) -> list[str]:
    """Keeps one cell's line of a mistake that many cells share."""
    first: dict[str, str] = {}
    count: dict[str, int] = {}
    for problem in problems:
        said = problem.partition(": ")[2]
        first.setdefault(said, problem)
        count[said] = count.get(said, 0) + 1
    return [line if count[said] == 1 else f"{said} ({count[said]} cells)" for said, line in first.items()]


def _open_stores(
    decided: list[build.Resolved], home: Path, *, tokenise: bool
) -> dict[DataKey, tuple[str, Corpus | None]]:
    """(data digest, documents) of each choice of sources and tokenizer, looked up once however many cells share it."""
    sharing: dict[DataKey, list[build.Resolved]] = {}
    for resolved in decided:
        sharing.setdefault(_data_key(resolved), []).append(resolved)
    digests = file_digests(home)
    with user_input():  # all of them first: a store of one is not written when another's documents are missing
        found = {
            key: Corpus.find(home, first.data, first.tokenizer, digests=digests) for key, (first, *_) in sharing.items()
        }
    if tokenise:
        for key, (first, *others) in sharing.items():
            found[key] = found[key][0], build.corpus(first, home, *others, digests=digests)
    return found


def _data_key(resolved: build.Resolved) -> DataKey:
    data = resolved.data
    of_source = {each.name: getattr(data, each.name) for each in fields(SourceConfig)}
    of_sources = {name: asdict(each) for name, each in data.sources.items()}
    return json.dumps([of_source, of_sources]), resolved.tokenizer.digest


def _size(resolved: build.Resolved, corpus: Corpus | None) -> Size:
    config, share, flops = resolved.config, None, None
    if corpus is not None:
        pairs = build.pair_counts(resolved, build.rows(resolved, corpus)[0].plan)
        tokens = config.tokens_per_step * config.trainer.max_steps
        per_token = pairs.visible / (pairs.rows * config.data.context_length)
        flops = training_flops(resolved.shape, tokens=tokens, visible_pairs=round(per_token * tokens))
        share = pairs.share
    return Size(
        parameter_count=parameter_count(resolved.shape),
        tokens_per_step=config.tokens_per_step,
        visible_pair_share=share,
        flops=flops,
    )


def _children(home: Path, experiment: str, sweep: str) -> "list[Run]":
    tracker = Tracker.existing(home, experiment)
    return tracker.find({"sweep": sweep, "kind": "trial"}) if tracker else []


def _state(
    cell: Cell, known: Identity, children: "list[Run]", home: Path, *, ignore_code: bool
) -> tuple[str, str, str | None]:
    """(state, why, the finished run or the one to go on with). A failed trial starts again in a run of its own."""
    same = [run for run in children if tag(run, "hash") == known.trial]
    finished = [run for run in same if run.info.status == "FINISHED" and tag(run, "outcome") == "completed"]
    if finished:
        return "done", f"finished in run {finished[0].info.run_id}", finished[0].info.run_id
    if same:
        run = same[0]
        how = tag(run, "outcome") or "lost"
        if how in GOES_ON:
            checkpoint = newest_checkpoint(trial_folder(home, run.info.run_id))
            where = f"goes on from {checkpoint.name}" if checkpoint else "starts again from step 0"
            return "resume", f"{how}; {where}", run.info.run_id
        return "failed", f"{how}: {tag(run, 'reason')}".rstrip(": "), None
    other = [
        run
        for run in children
        if json.loads(tag(run, "axes") or "{}") == cell.axes and tag(run, "seed") == str(cell.seed)
    ]
    if not other:
        return "new", "", None
    if tag(other[0], "config_hash") == known.config:
        if ignore_code and tag(other[0], "outcome") == "completed":
            return "done", f"finished by other code in run {other[0].info.run_id}", other[0].info.run_id
        return "stale", "the code has changed since", None
    return "new", "config or data differ from its earlier run", None
