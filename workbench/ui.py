"""Starts MLflow's own page on the right store, on this machine alone."""

import os
import socket
import subprocess
import sys
from pathlib import Path

from workbench.config import UserError
from workbench.tracking import store_path, store_uri


def page_address(port: int, experiment_id: str) -> str:
    """Opens on the runs of an experiment. Without `workflowType` a fresh browser shows MLflow's page for chat models."""
    return f"http://127.0.0.1:{port}/#/experiments/{experiment_id}/runs?workflowType=machine_learning"


def serve(home: Path, port: int) -> int:
    """Runs the server until it ends; its exit code.

    Raises:
        UserError: there is no store yet, or the port is taken.
    """
    if not store_path(home).is_file():
        raise UserError(f"{store_path(home)}: there is no run yet. Run `workbench sweep` or `workbench fit` first.")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except (OSError, OverflowError) as error:
            raise UserError(f"port {port} cannot be used ({error}). Choose another with --port.") from error
    experiments = _experiments(home)
    for name, experiment_id in experiments:
        print(f"{name}: {page_address(port, experiment_id)}", flush=True)
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", store_uri(home)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    environment = {
        **os.environ,
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # saves a process of 240 MB that only chat features use
    }
    server = subprocess.Popen(command, env=environment, cwd=home)
    try:
        return server.wait()
    except KeyboardInterrupt:
        server.wait(timeout=10)
        return 0


def _experiments(home: Path) -> list[tuple[str, str]]:
    """Name and id of every experiment with runs, read with plain sqlite: importing MLflow here would cost seconds."""
    import sqlite3
    from contextlib import closing

    with closing(sqlite3.connect(f"file:{store_path(home)}?mode=ro", uri=True)) as connection:
        rows = connection.execute(
            "SELECT name, experiment_id FROM experiments WHERE lifecycle_stage = 'active' AND experiment_id IN "
            "(SELECT experiment_id FROM runs) ORDER BY experiment_id"
        )
        return [(str(name), str(number)) for name, number in rows]
