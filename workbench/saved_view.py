"""A saved view of MLflow's page per sweep: its trials alone, its axes as columns, its charts.

By default the page shows one folded run and no results. The page keeps named views as tags of the experiment,
`mlflow.sharedViewState.<key>`; we write one. The format is undocumented (read from MLflow 3.17's `runs-charts.types.ts`
and tried in a browser by `tests/workbench/test_ui.py`), so whatever goes wrong here costs the link and nothing else.
"""

import json
import sqlite3
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

from workbench.tracking import TAG, Tracker

PREFIX = "mlflow.sharedViewState."
OURS = "workbench-"
"""Begins our views' keys."""
LOSS, SPEED, MEMORY = "val/loss", "throughput/tokens_per_second", "memory/peak_gigabytes"
LINES = ("train/loss", LOSS, SPEED)
LONGEST_STATE = 20_000


def write_saved_view(tracker: Tracker, sweep_name: str, axis_keys: Sequence[str]) -> str | None:
    """Writes or renews the sweep's view; the view's key, or None where this MLflow has none.

    Args:
        tracker: the store and experiment that hold the sweep's runs.
        sweep_name: value of the trials' tag `workbench.sweep`; the view is named after it.
        axis_keys: dotted keys of the sweep's axes, which are params of every trial.
    """
    from mlflow.exceptions import MlflowException

    key = f"{OURS}{sweep_name}"
    now = int(time.time() * 1000)
    state = json.dumps(_state(sweep_name, axis_keys))
    view = json.dumps({"name": f"sweep {sweep_name}", "createdAt": now, "updatedAt": now, "state": state})
    try:
        if not _page_has_views() or len(view) > LONGEST_STATE:
            return None
        tracker.client.set_experiment_tag(tracker.experiment_id, PREFIX + key, view)
    except (MlflowException, OSError):
        return None
    return key


def view_address(runs_page: str, key: str) -> str:
    """The view's address, given that of the experiment's runs (`ui.page_address`)."""
    return f"{runs_page}&compareRunsMode=CHART&viewStateShareKey={quote(key)}"


def saved_views(store: Path) -> list[tuple[str, str, str]]:
    """(name, experiment id, key) of each view of ours, read with plain sqlite; none where that fails."""
    try:
        with closing(sqlite3.connect(f"{store.as_uri()}?mode=ro", uri=True)) as connection:
            rows = connection.execute(
                "SELECT key, experiment_id, value FROM experiment_tags JOIN experiments USING (experiment_id) "
                "WHERE lifecycle_stage = 'active' AND substr(key, 1, ?) = ? ORDER BY experiment_id, key",
                (len(PREFIX + OURS), PREFIX + OURS),
            ).fetchall()
        return [(json.loads(value)["name"], str(number), key.removeprefix(PREFIX)) for key, number, value in rows]
    except (sqlite3.Error, ValueError, KeyError, TypeError):
        return []


def _state(sweep_name: str, axis_keys: Sequence[str]) -> dict[str, Any]:
    wanted = f"tags.`{TAG}sweep` = '{sweep_name}' AND tags.`{TAG}kind` = 'trial' AND tags.`{TAG}superseded_by` IS NULL"
    columns = [f"params.`{key}`" for key in axis_keys] + [f"metrics.`{name}`" for name in (LOSS, SPEED, MEMORY)]
    columns.append(f"tags.`{TAG}outcome`")
    section = {"uuid": "workbench", "name": f"Sweep {sweep_name}", "display": True, "isReordered": True, "columns": 2}
    parallel = {"type": "PARALLEL", "selectedParams": list(axis_keys), "selectedMetrics": [LOSS], "showAllRuns": True}
    lines = [
        {"type": "LINE", "metricKey": name, "selectedMetricKeys": [name], "xAxisKey": "step", "lineSmoothness": 0}
        | {"xAxisScaleType": "linear", "scaleType": "linear", "useGlobalXaxisKey": True, "useGlobalLineSmoothing": True}
        for name in LINES
    ]
    card = {"metricSectionId": section["uuid"], "deleted": False, "isGenerated": False, "runsCountToCompare": 100}
    charts = [{**chart, **card, "uuid": f"workbench-{i}"} for i, chart in enumerate([parallel, *lines])]
    return {
        "searchFilter": wanted,
        "orderByKey": f"metrics.`{LOSS}`",
        "orderByAsc": True,
        "startTime": "ALL",
        "lifecycleFilter": "Active",
        "datasetsFilter": [],
        "selectedColumns": columns,
        "columnOrder": columns,
        "columnWidths": {column: max(130, 8 * len(column.partition(".")[2]) + 16) for column in columns},
        "runsHiddenMode": "SHOW_ALL",
        "compareRunCharts": charts,
        "compareRunSections": [section],
        "isAccordionReordered": True,
    }


def _page_has_views() -> bool:
    """Whether the installed page's own code knows such tags and the address's parameter."""
    import mlflow

    scripts = Path(mlflow.__file__).parent.glob("server/js/build/static/js/main.*.js")
    texts = [script.read_text(encoding="utf-8", errors="replace") for script in scripts]
    return any(PREFIX in text and "viewStateShareKey" in text for text in texts)
