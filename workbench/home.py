"""Where all state lives: one folder, absolute whatever the current folder.

home/
  mlflow.db     runs, params, metrics, tags
  artifacts/    what the MLflow page shows under Artifacts
  tokens/       token stores, one folder per corpus and tokenizer
  trials/       one folder per run: checkpoints, log, outcome
"""

import json
import os
from pathlib import Path
from typing import Any

from workbench.errors import UserError

PROJECT_ROOT = Path(__file__).resolve().parent.parent


def home_directory() -> Path:
    """$WORKBENCH_HOME, else `runs/` of the checkout, else (installed without one) ~/.local/share/workbench."""
    chosen = os.environ.get("WORKBENCH_HOME")
    if chosen:
        return Path(chosen).expanduser().absolute()
    if (PROJECT_ROOT / "pyproject.toml").is_file():
        return PROJECT_ROOT / "runs"
    return Path.home() / ".local" / "share" / "workbench"


def writable_home() -> Path:
    """`home_directory()`, if it can be written or made.

    Raises:
        UserError: it cannot.
    """
    home = home_directory()
    nearest = next(path for path in (home, *home.parents) if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise UserError(
            f"{home}: cannot be written ({nearest} is in the way). Set WORKBENCH_HOME to a folder that can."
        )
    return home


def trial_folder(home: Path, run_id: str) -> Path:
    """A run's own folder: checkpoints, log, outcome."""
    return home / "trials" / run_id


def write_json(path: Path, value: Any) -> None:
    """Writes whole or not at all: to a temporary name beside, then renamed."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def read_json(path: Path) -> Any | None:
    """The value, or None where there is no such file or it is no JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
