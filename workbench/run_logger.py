"""Lightning's logger for a run that already exists: it adopts the run's id and only ever adds metric points.

Lightning's own MLFlowLogger opens the store on every rank, makes runs, writes a point twice after a resume and sets the
status to FINISHED at the end of each stage. Here the run, its params and its status belong to whoever launched it.
"""

import logging
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only

if TYPE_CHECKING:
    from mlflow.entities import Metric
    from mlflow.tracking import MlflowClient

log = logging.getLogger(__name__)

FLUSH_SECONDS = 5.0
FLUSH_POINTS = 200


class RunLogger(Logger):
    """Buffers points and writes them in batches (one write of ten points costs what one point costs).

    One point per key and step: after a resume the steps that the store already has are left out, since training repeats
    them exactly. Infinite values are dropped and counted (MLflow would store 1.8e308 and wreck the chart's axis).
    """

    def __init__(self, client: "MlflowClient", run_id: str, folder: Path) -> None:
        """Args: the store's client, an existing run, the run's folder (Lightning's save_dir)."""
        super().__init__()
        self.client, self.run_id, self.folder = client, run_id, folder
        self.dropped_points = 0
        self._buffer: list[Metric] = []
        self._flushed_at = time.monotonic()
        self._last_step = {
            key: max(point.step for point in client.get_metric_history(run_id, key))
            for key in client.get_run(run_id).data.metrics
        }

    @property
    def name(self) -> str:
        """Part of Lightning's folder names, unused by us."""
        return "workbench"

    @property
    def version(self) -> str:
        """The MLflow run's id."""
        return self.run_id

    @property
    def save_dir(self) -> str:
        """The run's folder."""
        return str(self.folder)

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Nothing: the launcher has written the resolved config."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Takes points of one optimizer step."""
        from mlflow.entities import Metric

        if step is None:
            raise TypeError("a metric point needs its optimizer step")
        now = int(time.time() * 1000)
        for key, raw in metrics.items():
            value = float(raw)
            if step <= self._last_step.get(key, -1):
                continue
            if math.isinf(value):
                self.dropped_points += 1
                continue
            self._last_step[key] = step
            self._buffer.append(Metric(key, value, now, step))
        if len(self._buffer) >= FLUSH_POINTS or time.monotonic() - self._flushed_at > FLUSH_SECONDS:
            self.save()

    @rank_zero_only
    def save(self) -> None:
        """Writes the buffer. A store that does not answer costs nothing but memory until the next try."""
        try:
            self.flush()
        except Exception as error:
            log.warning("metrics not written, kept for the next try: %s", error)

    @rank_zero_only
    def flush(self) -> None:
        """Writes the buffer or raises; nothing is lost either way."""
        self._flushed_at = time.monotonic()
        while self._buffer:
            batch = self._buffer[:1000]
            self.client.log_batch(self.run_id, metrics=batch)
            del self._buffer[: len(batch)]

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Writes what is left; the status is the launcher's to set."""
        if self.dropped_points:
            self.client.set_tag(self.run_id, "workbench.dropped_points", str(self.dropped_points))
        self.flush()
