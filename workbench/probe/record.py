"""A probe as one MLflow run: settings, numbers, tables and figures.

Metrics, each over its own axis as the step: `deviation/<condition>`, `row_deviation/...` and `first_token_share/...`
over the shift in tokens, `logit_deviation/...` over the length in tokens, `consistency_kl/...` and
`consistency_logit_difference/...` over the offset. A condition is `bfloat16/compute`, say.
"""

import dataclasses
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from workbench import environment
from workbench.model_source import ModelSource
from workbench.probe.figures import draw
from workbench.probe.measure import ConditionResult
from workbench.probe.settings import ProbeSettings
from workbench.probe.tables import as_csv, condition_of, consistency_rows, deviation_rows, head_rows, token_rows
from workbench.tracking import Tracker

EXPERIMENT = "probe"


@contextmanager
def recorded(
    tracker: Tracker, model: str, settings: ProbeSettings, facts: dict[str, Any]
) -> Iterator[tuple[Tracker, str]]:
    """A run that is RUNNING inside and has a true status afterwards; yields the store and the run's id.

    Args:
        tracker: the store.
        model: what the user calls the model.
        settings: logged as params.
        facts: more params, known before the start.
    """
    run_id = tracker.create(f"probe {model}"[:250], {"kind": "probe"})
    try:
        tracker.log_params(run_id, {"model": model, **dataclasses.asdict(settings), **facts})
        tracker.client.log_dict(run_id, environment.describe(settings.device), "environment.json")
        yield tracker, run_id
    except BaseException as error:
        stopped = isinstance(error, KeyboardInterrupt)
        tracker.close(
            run_id,
            status="KILLED" if stopped else "FAILED",
            outcome="cancelled" if stopped else "crash",
            reason=f"{type(error).__name__}: {error}",
        )
        raise
    tracker.close(run_id, status="FINISHED", outcome="completed")


def record(
    tracker: Tracker, run_id: str, source: ModelSource, settings: ProbeSettings, results: list[ConditionResult]
) -> dict[str, Any]:
    """Writes everything; returns the JSON document."""
    rows, consistency = deviation_rows(settings, results), consistency_rows(settings, results)
    document = {"model": source.name, "rows": rows, "consistency": consistency}
    tracker.client.log_dict(run_id, {**document, "settings": dataclasses.asdict(settings)}, "probe.json")
    tables = {
        "rows.csv": rows,
        "consistency.csv": consistency,
        "heads.csv": head_rows(settings, results),
        "tokens.csv": token_rows(settings, results),
    }
    for name, table in tables.items():
        if table:
            tracker.client.log_text(run_id, as_csv(table), f"tables/{name}")
    for name, figure in draw(source.short_name, settings, results).items():
        tracker.client.log_figure(run_id, figure, f"figures/{name}")
    _log_metrics(tracker, run_id, settings, rows, consistency)
    return document


def _log_metrics(
    tracker: Tracker,
    run_id: str,
    settings: ProbeSettings,
    rows: list[dict[str, Any]],
    consistency: list[dict[str, Any]],
) -> None:
    from mlflow.entities import Metric

    now = int(time.time() * 1000)
    furthest = max(settings.shifts, key=lambda shift: abs(shift - settings.reference_shift))
    points = []
    for row in rows:
        label = condition_of(row).label
        if row["tokens"] == settings.tokens:
            points += [
                Metric(f"{key}/{label}", row[key], now, row["shift"])
                for key in ("deviation", "row_deviation", "first_token_share")
            ]
        if row["shift"] == furthest:
            points.append(Metric(f"logit_deviation/{label}", row["logit_deviation"], now, row["tokens"]))
    for row in consistency:
        label = condition_of(row).label
        points += [
            Metric(f"consistency_kl/{label}", row["mean_kl"], now, row["offset"]),
            Metric(f"consistency_logit_difference/{label}", row["max_logit_difference"], now, row["offset"]),
        ]
    for start in range(0, len(points), 1000):
        tracker.client.log_batch(run_id, metrics=points[start : start + 1000])
