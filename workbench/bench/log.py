"""A benchmark's rows as one MLflow run."""

from collections.abc import Mapping
from typing import Any

from workbench import environment
from workbench.home import writable_home
from workbench.tracking import Tracker

EXPERIMENT = "bench"


def log_bench(subject: str, rows: list[dict[str, Any]], settings: Mapping[str, Any]) -> None:
    """Writes settings as params, rows as `rows.json`, the machine as `environment.json`, seconds as metrics."""
    tracker = Tracker(writable_home(), EXPERIMENT)
    run_id = tracker.create(f"bench {subject}", {"kind": "bench"})
    tracker.log_params(run_id, settings)
    tracker.client.log_dict(run_id, {"rows": rows}, "rows.json")
    tracker.client.log_dict(run_id, environment.describe(str(settings.get("device", "cpu"))), "environment.json")
    for row in rows:
        if row.get("seconds") is not None:
            name = "/".join(str(row[key]) for key in ("subject", "strategy", "kernel", "precision") if row.get(key))
            tracker.client.log_metric(run_id, f"{name}/seconds", row["seconds"], step=row["tokens"])
    tracker.close(run_id, status="FINISHED", outcome="completed")
