"""The MLflow store: opened safely, one experiment, one parent run per sweep, one child run per trial.

Facts about MLflow 3.17 that shape this file: several processes that open a fresh sqlite store at once corrupt it, so
the schema is made once under a file lock; FINISHED does not mean completed (an uncaught exception writes it too), so a
tag of our own holds the outcome, and the process that launched a run sets its status; values of params are cut at 6000
characters and batches at 100 params.
"""

import logging
import os
import sqlite3
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.errors import UserError

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient

TAG = "workbench."
"""Prefix of all our tags."""


class Tracker:
    """The runs of one home folder.

    Tags on a run: `workbench.kind` (sweep, trial or fit), `.sweep` (name), `.cell` (readable), `.axes` (JSON),
    `.seed`, `.hash` (identity of the trial), `.outcome`, `.reason`, `.attempt`, `.host`, `.pid`, `.superseded_by`,
    `.code_version`, `.data_digest`, `.device`, `.kernel`.
    """

    def __init__(self, home: Path, experiment: str) -> None:
        """Opens the store and the experiment, making what is missing.

        Raises:
            UserError: the home cannot be written, the store needs an upgrade, or the experiment was deleted.
        """
        self.home = home
        try:
            home.mkdir(parents=True, exist_ok=True)
            with _initialisation_lock(home):
                self.client = _open(home)
                self.experiment_id = self._experiment(experiment)
        except OSError as error:
            raise UserError(
                f"{home}: cannot be written: {error.strerror}. Set WORKBENCH_HOME to a folder that can."
            ) from error

    @staticmethod
    def existing(home: Path, experiment: str) -> "Tracker | None":
        """The tracker where there is such a store and experiment already; never makes one."""
        if not store_path(home).is_file():
            return None
        with _initialisation_lock(home):
            found = _open(home).get_experiment_by_name(experiment)
        return Tracker(home, experiment) if found else None

    def _experiment(self, name: str) -> str:
        found = self.client.get_experiment_by_name(name)
        if found is None:
            artifacts = self.home / "artifacts"
            return self.client.create_experiment(
                name, artifact_location=artifacts.as_uri(), tags={"mlflow.experimentKind": "custom_model_development"}
            )
        if found.lifecycle_stage != "active":
            raise UserError(
                f"tracking.experiment={name!r} was deleted in the MLflow store. Bring it back with `mlflow experiments "
                f"restore --experiment-id {found.experiment_id}` under MLFLOW_TRACKING_URI={store_uri(self.home)}, "
                "or choose another name."
            )
        return str(found.experiment_id)

    def create(self, name: str, tags: Mapping[str, str], *, parent: str | None = None) -> str:
        """A new RUNNING run; its id. `tags` without our prefix."""
        own = {f"{TAG}{key}": value for key, value in tags.items()}
        if parent:
            own["mlflow.parentRunId"] = parent
        run = self.client.create_run(self.experiment_id, run_name=name, tags={**own, **_source_tags()})
        return str(run.info.run_id)

    def find(self, tags: Mapping[str, str]) -> "list[Run]":
        """Active runs with all these tags (without our prefix; `parent` is the parent's id), newest first."""
        names = {key: "mlflow.parentRunId" if key == "parent" else f"{TAG}{key}" for key in tags}
        wanted = " and ".join(f"tags.`{names[key]}` = '{_quoted(value)}'" for key, value in tags.items())
        found: list[Run] = []
        token = None
        while True:
            page = self.client.search_runs(
                [self.experiment_id],
                wanted,
                max_results=1000,
                order_by=["attributes.start_time DESC"],
                page_token=token,
            )
            found.extend(page)
            token = page.token
            if not token:
                return found

    def log_params(self, run_id: str, params: Mapping[str, Any]) -> None:
        """Writes each param once. A value longer than MLflow keeps is whole in the config artifact alone."""
        from mlflow.entities import Param

        known = self.client.get_run(run_id).data.params
        new = [Param(key, param_text(value)) for key, value in params.items() if key not in known]
        for start in range(0, len(new), 100):
            self.client.log_batch(run_id, params=new[start : start + 100])

    def log_dataset(self, run_id: str, *, name: str, digest: str, source: str, profile: Mapping[str, Any]) -> None:
        """Records what the run is trained on; fills the page's Dataset column."""
        import json

        from mlflow.entities import Dataset, DatasetInput, InputTag

        dataset = Dataset(
            name=name[:500],
            digest=digest[:36],
            source_type="local",
            source=json.dumps({"uri": source}),
            profile=json.dumps(dict(profile)),
        )
        self.client.log_inputs(run_id, [DatasetInput(dataset, [InputTag("mlflow.data.context", "train")])])

    def set_tags(self, run_id: str, tags: Mapping[str, str]) -> None:
        """Writes tags; keys without our prefix."""
        from mlflow.entities import RunTag

        self.client.log_batch(run_id, tags=[RunTag(f"{TAG}{key}", value[:8000]) for key, value in tags.items()])

    def reopen(self, run_id: str) -> None:
        """RUNNING again: the run goes on, and how it ended before no longer counts."""
        self._forget(run_id, "outcome", "reason")
        self.client.update_run(run_id, status="RUNNING")

    def _forget(self, run_id: str, *names: str) -> None:
        tags = self.client.get_run(run_id).data.tags
        for name in names:
            if f"{TAG}{name}" in tags:
                self.client.delete_tag(run_id, f"{TAG}{name}")

    def close(self, run_id: str, *, status: str, outcome: str, reason: str = "") -> None:
        """The run's end. Status FINISHED, FAILED or KILLED as MLflow knows them; outcome as we do."""
        if not reason:
            self._forget(run_id, "reason")
        self.set_tags(run_id, {"outcome": outcome} | ({"reason": reason} if reason else {}))
        self.client.set_terminated(run_id, status=status, end_time=int(time.time() * 1000))


def existing_client(home: Path) -> "MlflowClient | None":
    """A client of the home's store, whatever the experiment; None where there is no store."""
    if not store_path(home).is_file():
        return None
    with _initialisation_lock(home):
        return _open(home)


def tag(run: "Run", name: str) -> str:
    """One of our tags, or the empty string."""
    return str(run.data.tags.get(f"{TAG}{name}", ""))


def store_path(home: Path) -> Path:
    """The sqlite file."""
    return home / "mlflow.db"


def store_uri(home: Path) -> str:
    """The tracking URI, absolute."""
    return f"sqlite:///{store_path(home)}"


def _open(home: Path) -> "MlflowClient":
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    for chatty in ("mlflow.store.db.utils", "alembic"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient
    from sqlalchemy.exc import SQLAlchemyError

    fresh = not store_path(home).exists()
    try:
        client = MlflowClient(store_uri(home))
        client.search_experiments(max_results=1)  # makes or checks the schema
    except (MlflowException, SQLAlchemyError) as error:
        raise UserError(
            f"{store_path(home)}: MLflow cannot open this store: {str(error).splitlines()[0]} Copy the file, then run "
            f"`mlflow db upgrade {store_uri(home)}`, or set WORKBENCH_HOME to another folder."
        ) from error
    if fresh:
        # A property of the file: readers no longer block the writer. About twice the writes per second for eight runs.
        with closing(sqlite3.connect(store_path(home))) as connection:
            connection.execute("PRAGMA journal_mode=WAL")
    return client


@contextmanager
def _initialisation_lock(home: Path) -> Iterator[None]:
    from filelock import FileLock

    with FileLock(home / "mlflow.db.lock"):
        yield


def _source_tags() -> dict[str, str]:
    """What MLflow's page shows as user and source."""
    import getpass
    import sys

    from workbench.environment import git_commit

    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user id without a name
        user = str(os.getuid())
    commit, _ = git_commit()
    tags = {
        "mlflow.user": user,
        "mlflow.source.type": "LOCAL",
        "mlflow.source.name": " ".join(["workbench", *sys.argv[1:]])[:500],
    }
    return {**tags, "mlflow.source.git.commit": commit} if commit else tags


def param_text(value: Any) -> str:
    """A config value as MLflow keeps it."""
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= 6000 else f"{text[:5900]}... cut here, whole in config.yaml"


def _quoted(value: str) -> str:
    if "'" in value:
        raise UserError(f"{value!r} holds a quote, which MLflow's search cannot ask for. Choose a name without.")
    return value
