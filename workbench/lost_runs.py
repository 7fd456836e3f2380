"""Runs whose process was killed: MLflow shows them RUNNING for ever unless somebody says otherwise."""

import platform
import time
from collections.abc import Mapping

from workbench.tracking import Tracker, tag
from workbench.trial import is_alive

PATIENCE_SECONDS = 5.0
"""A trial ends itself within two seconds of its launcher's death."""


def close_lost_runs(tracker: Tracker, tags: Mapping[str, str], *, owned: bool) -> None:
    """Closes RUNNING runs that nobody works on as KILLED, outcome `lost`.

    Args:
        tracker: the store.
        tags: which runs, as in `Tracker.find`.
        owned: the caller holds the lock of these runs, so none can be at work elsewhere. Otherwise only runs of this
            machine whose process is gone are closed.
    """
    for run in tracker.find(tags):
        if run.info.status != "RUNNING":
            continue
        pid = tag(run, "pid")
        here = tag(run, "host") == platform.node() and pid.isdigit()
        deadline = time.monotonic() + (PATIENCE_SECONDS if owned else 0.0)
        while (alive := here and is_alive(int(pid))) and time.monotonic() < deadline:
            time.sleep(0.2)
        if owned or (here and not alive):
            tracker.close(run.info.run_id, status="KILLED", outcome="lost", reason="its process was killed")
