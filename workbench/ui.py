"""Starts MLflow's own page on the right store, on this machine alone.

    start the server -> wait until GET /health answers -> print the addresses -> wait for Ctrl-C or SIGTERM -> stop it

MLflow's server is two processes, a command and uvicorn; both are ended as one process group, so that none outlives us.
"""

import http.client
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import FrameType

from workbench.errors import UserError
from workbench.saved_view import saved_views, view_address
from workbench.tracking import store_path, store_uri

READY_SECONDS = 180.0
"""How long the server may take to answer: about 7 s here, 30 s where every core is busy."""
GRACE_SECONDS = 10.0
POLL_SECONDS = 0.1


def serve(home: Path, port: int) -> int:
    """Runs the server until Ctrl-C or SIGTERM; 0, or 1 where the server ended by itself.

    Args:
        home: the folder with the store.
        port: of 127.0.0.1; 0 takes any free one.
    Raises:
        UserError: there is no store yet or it cannot be read, or the port is taken.
    """
    if not store_path(home).is_file():
        raise UserError(f"{store_path(home)}: there is no run yet. Run `workbench sweep` or `workbench fit` first.")
    port = _free(port)
    _experiments(home)  # a store that cannot be read is said before the server starts
    with _asked_to_stop() as stop:
        server = _start(home, port)
        try:
            deadline = time.monotonic() + READY_SECONDS
            while not _is_ready(port):
                if stop():
                    return 0
                if server.poll() is not None or time.monotonic() > deadline:
                    return _failed(f"did not answer on port {port}", server)
                time.sleep(POLL_SECONDS)
            _print_addresses(home, port)
            while not stop():
                if server.poll() is not None:
                    return _failed("ended", server)
                time.sleep(POLL_SECONDS)
            return 0
        finally:
            _end(server)


def page_address(port: int, experiment_id: str) -> str:
    """Opens on an experiment's runs. Without `workflowType` a fresh browser shows MLflow's page for chat models."""
    return f"http://127.0.0.1:{port}/#/experiments/{experiment_id}/runs?workflowType=machine_learning"


def _free(port: int) -> int:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except (OSError, OverflowError) as error:
            raise UserError(f"port {port} cannot be used ({error}). Choose another with --port.") from error
        return int(probe.getsockname()[1])


def _start(home: Path, port: int) -> "subprocess.Popen[bytes]":
    """The server, leader of its own process group. Its warnings come to our stderr, its notices and requests do not."""
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", store_uri(home)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--uvicorn-opts", "--log-level warning"]
    environment = {
        **os.environ,
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # saves a process of 240 MB that only chat features use
        "PYTHONWARNINGS": "ignore",  # of deprecations inside MLflow
    }
    return subprocess.Popen(command, env=environment, cwd=home, stdout=subprocess.DEVNULL, start_new_session=True)


def _is_ready(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    with closing(connection):
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False


def _print_addresses(home: Path, port: int) -> None:
    lines = [("all runs of " + name, page_address(port, number)) for name, number in _experiments(home)]
    for name, experiment_id, key in saved_views(store_path(home)):
        lines.append((name, view_address(page_address(port, experiment_id), key)))
    width = max((len(name) for name, _ in lines), default=0)
    print(f"MLflow's page is ready on http://127.0.0.1:{port} (Ctrl-C ends it):", flush=True)
    for name, address in lines:
        print(f"  {name:{width}}  {address}", flush=True)


def _failed(what: str, server: "subprocess.Popen[bytes]") -> int:
    code = server.poll()
    ended = "" if code is None else f" (exit code {code})"
    print(f"workbench: MLflow's server {what}{ended}. Its own messages stand above.", file=sys.stderr)
    return 1


def _end(server: "subprocess.Popen[bytes]") -> None:
    """SIGTERM to the group, grace, SIGKILL to whatever of the group is left."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(server.pid, number)
            server.wait(GRACE_SECONDS)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


@contextmanager
def _asked_to_stop() -> Iterator[Callable[[], bool]]:
    """Whether SIGINT, SIGTERM or SIGHUP has come. No exception anywhere, so that nothing is left half done."""
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield lambda: bool(came)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _experiments(home: Path) -> list[tuple[str, str]]:
    """Name and id of every experiment with runs, read with plain sqlite: importing MLflow here would cost seconds."""
    try:
        with closing(sqlite3.connect(f"{store_path(home).as_uri()}?mode=ro", uri=True)) as connection:
            rows = connection.execute(
                "SELECT name, experiment_id FROM experiments WHERE lifecycle_stage = 'active' AND experiment_id IN "
                "(SELECT experiment_id FROM runs) ORDER BY experiment_id"
            )
            return [(str(name), str(number)) for name, number in rows]
    except sqlite3.Error as error:
        raise UserError(f"{store_path(home)}: is no MLflow store that can be read ({error}).") from error
