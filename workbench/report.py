"""A sweep's results, read back from MLflow alone: one row per cell, mean and spread over its seeds.

Every number and every blank has a source: a speed-up between different kernels, devices or thread counts is no speed-up
of the strategy, so it stays blank and the reason stands beside it.
"""

import json
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.errors import UserError
from workbench.tracking import Tracker, tag

if TYPE_CHECKING:
    from mlflow.entities import Run

STRATEGY = "attention.strategy"
LENGTH = "data.context_length"
LOSS, SPEED, SHARE, MEMORY = (
    "val/loss",
    "throughput/tokens_per_second",
    "attention/visible_pair_share",
    "memory/peak_gigabytes",
)


@dataclass(frozen=True)
class Spread:
    """Mean over seeds, and the sample standard deviation where there are two or more."""

    mean: float
    std: float | None
    count: int

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread | None":
        """None for no values."""
        kept = list(values)
        if not kept:
            return None
        return cls(statistics.fmean(kept), statistics.stdev(kept) if len(kept) > 1 else None, len(kept))

    def text(self, form: str) -> str:
        """'2.310 ± 0.020', or the mean alone."""
        mean = form.format(self.mean)
        return mean if self.std is None else f"{mean} ± {form.format(self.std)}"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One cell."""

    axes: dict[str, Any]
    seeds: list[int]
    outcomes: dict[str, int]
    """How many seeds ended how: {'completed': 3}."""
    metrics: dict[str, Spread]
    kernel: str
    device: str
    """Device name, and threads on a CPU: what a speed belongs to."""
    speed_up: float | None
    speed_up_blank: str
    """Why there is no speed-up."""

    @property
    def outcome(self) -> str:
        """'completed', or every outcome with its count."""
        if set(self.outcomes) == {"completed"}:
            return "completed"
        if sum(self.outcomes.values()) == 1:
            return next(iter(self.outcomes))
        return ", ".join(f"{name} {count}" for name, count in sorted(self.outcomes.items()))


@dataclass(frozen=True, kw_only=True)
class Report:
    """All cells of a sweep."""

    sweep: str
    parent: str
    axis_keys: list[str]
    rows: list[Row]

    def to_json(self) -> dict[str, Any]:
        """The document that `report --json` prints."""
        return {
            "sweep": self.sweep,
            "rows": [
                {
                    "cell": row.axes,
                    "seeds": row.seeds,
                    "outcome": row.outcome,
                    "kernel": row.kernel,
                    "device": row.device,
                    "speed_up": row.speed_up,
                    "speed_up_blank": row.speed_up_blank,
                    "metrics": {name: {"mean": spread.mean, "std": spread.std} for name, spread in row.metrics.items()},
                }
                for row in self.rows
            ],
        }


def find_sweep(tracker: Tracker, wanted: str) -> "Run":
    """The parent run of a sweep given as file, name or run id; the newest where several fit.

    Raises:
        UserError: no such sweep in this store.
    """
    from mlflow.exceptions import MlflowException

    name = wanted
    if Path(wanted).is_file():
        from workbench.sweep_file import read_sweep

        name = read_sweep(Path(wanted)).name
    found = tracker.find({"kind": "sweep", "sweep": name})
    if found:
        return found[0]
    try:
        run = tracker.client.get_run(wanted)
        if tag(run, "kind") == "sweep":
            return run
    except MlflowException:
        pass
    known = sorted({tag(run, "sweep") for run in tracker.find({"kind": "sweep"})})
    raise UserError(
        f"{wanted}: no sweep of that file, name or run id in {tracker.home}. "
        + (f"There are: {', '.join(known)}." if known else "There is none yet; run `workbench sweep FILE` first.")
    )


def build_report(tracker: Tracker, parent: "Run") -> Report:
    """Reads a sweep's trials, the superseded ones left out."""
    children = [run for run in tracker.find({"parent": parent.info.run_id}) if not tag(run, "superseded_by")]
    cells: dict[str, list[Run]] = {}
    for run in sorted(children, key=lambda run: run.info.start_time):
        cells.setdefault(tag(run, "axes"), []).append(run)
    rows = [_row(tracker, json.loads(axes), runs) for axes, runs in cells.items()]
    axis_keys = json.loads(tag(parent, "axes") or "[]")
    rows = [_with_speed_up(row, rows) for row in sorted(rows, key=lambda row: _order(row, axis_keys))]
    return Report(sweep=tag(parent, "sweep"), parent=parent.info.run_id, axis_keys=axis_keys, rows=rows)


def _row(tracker: Tracker, axes: dict[str, Any], runs: "list[Run]") -> Row:
    completed = [run for run in runs if _outcome(run) == "completed"]
    metrics = {
        name: spread
        for name in (LOSS, "val/loss_first_token", "val/perplexity", "train/loss", MEMORY)
        if (spread := Spread.of(run.data.metrics[name] for run in completed if name in run.data.metrics))
    }
    for name, over_steps in ((SPEED, _median_after_first), (SHARE, statistics.fmean)):
        histories = [_history(tracker, run, name) for run in completed]
        if spread := Spread.of(over_steps(values) for values in histories if values):
            metrics[name] = spread
    outcomes: dict[str, int] = {}
    for run in runs:
        outcomes[_outcome(run)] = outcomes.get(_outcome(run), 0) + 1
    return Row(
        axes=axes,
        seeds=sorted(int(tag(run, "seed")) for run in runs),
        outcomes=outcomes,
        metrics=metrics,
        kernel=_one(tag(run, "kernel") for run in completed),
        device=_one(tag(run, "device_name") for run in completed),
        speed_up=None,
        speed_up_blank="",
    )


def _outcome(run: "Run") -> str:
    """Our outcome; a run that has none yet is running, or was lost."""
    return tag(run, "outcome") or run.info.status.lower()


def _history(tracker: Tracker, run: "Run", metric: str) -> list[float]:
    """All values of a metric, by step."""
    points = tracker.client.get_metric_history(run.info.run_id, metric)
    return [point.value for point in sorted(points, key=lambda point: point.step)]


def _median_after_first(values: list[float]) -> float:
    """Without the first point, which pays for warming up."""
    return statistics.median(values[1:] or values)


def _one(values: Iterable[str]) -> str:
    """The common value, or all of them."""
    return " | ".join(sorted({value for value in values if value}))


def _with_speed_up(row: Row, rows: list[Row]) -> Row:
    if STRATEGY not in row.axes:
        return replace(row, speed_up_blank=f"{STRATEGY} is no axis")
    others = {key: value for key, value in row.axes.items() if key != STRATEGY}
    full = next((other for other in rows if other.axes == {**row.axes, STRATEGY: "full"}), None)
    if full is None:
        return replace(row, speed_up_blank="no full attention at " + (_cell_text(others) or "these settings"))
    if SPEED not in row.metrics or SPEED not in full.metrics:
        return replace(row, speed_up_blank="not completed" if SPEED not in row.metrics else "full did not complete")
    for what in ("kernel", "device"):
        here, there = getattr(row, what), getattr(full, what)
        if here != there or " | " in here:
            return replace(row, speed_up_blank=f"{what} differs: {here}, full {there}")
    return replace(row, speed_up=row.metrics[SPEED].mean / full.metrics[SPEED].mean)


def _order(row: Row, axis_keys: list[str]) -> list[tuple[int, float, str]]:
    """Axes in the file's order; numbers by size, strategies in the registry's order, other words by name."""
    from modules.attention.strategies import STRATEGIES

    strategies = list(STRATEGIES)

    def key(value: Any) -> tuple[int, float, str]:
        if value in strategies:
            return 0, strategies.index(value), ""
        if isinstance(value, int | float):
            return 0, float(value), ""
        return 1, 0.0, str(value)

    return [key(row.axes.get(name)) for name in axis_keys]


def _cell_text(axes: dict[str, Any]) -> str:
    return ", ".join(f"{key.rpartition('.')[2]}={value}" for key, value in axes.items())
