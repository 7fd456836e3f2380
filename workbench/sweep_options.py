"""What a sweep file says besides its cells: what a trial may use, when it is given up, what its result is.

    resources: {cpus: 2, gpus: 1}
    limits: {timeout: 90m, retries: {crash: 1, lost: 3}, fail_fast_after: 3}
    objective: {metric: val/loss, mode: min}
    report: {rows: attention.strategy, columns: data.context_length, facets: trainer.precision, values: [val/loss]}

Each reader takes the value as YAML gave it and adds every mistake to `problems`.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from workbench.config import suggestion
from workbench.outcome import STATUS_OF

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
RETRIED_AS_LOST = ("lost", "host_oom", "hardware", "interrupted")
"""Outcomes that say nothing about the trial itself."""


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What one trial gets. None: the launcher's default."""

    cpus: int | None = None
    gpus: int | None = None


@dataclass(frozen=True, kw_only=True)
class Limits:
    """When a trial is given up, and when tried again."""

    timeout_seconds: float | None = None
    """Wall-clock time of one attempt."""
    retries: dict[str, int] = field(default_factory=lambda: {"lost": 3})
    """Further attempts by outcome; `lost` stands for all of RETRIED_AS_LOST, what is not named has none."""
    fail_fast_after: int = 3
    """Trials that end with the outcome `config`, before their first step, after which the sweep stops."""

    def tries_again(self, outcome: str, attempts: int) -> bool:
        """Whether a trial that ended so, after that many attempts in this call, gets another."""
        key = "lost" if outcome in RETRIED_AS_LOST else outcome
        return attempts <= self.retries.get(key, 0)


@dataclass(frozen=True, kw_only=True)
class Objective:
    """What the sweep is about: the metric by which the report and MLflow's page order its trials."""

    metric: str = "val/loss"
    mode: str = "min"


@dataclass(frozen=True, kw_only=True)
class Pivot:
    """How the report lays the cells out in two dimensions."""

    rows: str | None = None
    columns: str | None = None
    facets: str | None = None
    """An axis with one table per value."""
    values: tuple[str, ...] = ()
    """Metrics; empty: the objective."""


def read_resources(value: Any, problems: list[str]) -> Resources:
    """`resources:` of a sweep file."""
    given = _mapping("resources", value, ("cpus", "gpus"), problems)
    for key, least in (("cpus", 1), ("gpus", 0)):
        number = given.get(key)
        if number is not None and (type(number) is not int or number < least):
            problems.append(f"resources.{key}={number!r} must be a whole number of at least {least}.")
            given.pop(key)
    return Resources(**given)


def read_limits(value: Any, problems: list[str]) -> Limits:
    """`limits:` of a sweep file."""
    given = _mapping("limits", value, ("timeout", "retries", "fail_fast_after"), problems)
    seconds = None
    if (timeout := given.get("timeout")) is not None:
        seconds = duration_seconds(timeout)
        if seconds is None:
            problems.append(f"limits.timeout={timeout!r} must be seconds or a time such as 90s, 30m, 2h or 1d.")
    kinds = [name for name in STATUS_OF if name not in ("completed", "cancelled", *RETRIED_AS_LOST[1:])]
    retries = _mapping("limits.retries", given.get("retries"), kinds, problems)
    for name, number in retries.items():
        if type(number) is not int or number < 0:
            problems.append(f"limits.retries.{name}={number!r} must be a whole number of further attempts.")
    after = given.get("fail_fast_after", 3)
    if type(after) is not int or after < 1:
        problems.append(f"limits.fail_fast_after={after!r} must be a whole number of at least 1.")
    return Limits(timeout_seconds=seconds, retries={"lost": 3, **retries}, fail_fast_after=after)


def read_objective(value: Any, problems: list[str]) -> Objective:
    """`objective:` of a sweep file."""
    given = _mapping("objective", value, ("metric", "mode"), problems)
    if not isinstance(given.get("metric", ""), str):
        problems.append(f"objective.metric={given['metric']!r} must be the name of a metric, for example val/loss.")
    if given.get("mode", "min") not in ("min", "max"):
        problems.append(f"objective.mode={given['mode']!r} must be min or max.")
    return Objective(**given)


def read_pivot(value: Any, axis_keys: Sequence[str], problems: list[str]) -> Pivot:
    """`report:` of a sweep file."""
    given = _mapping("report", value, ("rows", "columns", "facets", "values"), problems)
    values = given.pop("values", [])
    if isinstance(values, str):
        values = [values]
    if not isinstance(values, list) or not all(isinstance(name, str) for name in values):
        problems.append(f"report.values={values!r} must be a list of metrics, for example [val/loss].")
        values = []
    for key, axis in given.items():
        if axis not in axis_keys:
            near = suggestion(str(axis), axis_keys) or f" The axes are {', '.join(axis_keys)}."
            problems.append(f"report.{key}={axis!r} is no axis of this sweep.{near}")
    if len(set(map(str, given.values()))) < len(given):
        problems.append(f"report={given!r} names one axis twice.")
    return Pivot(**given, values=tuple(values))


def duration_seconds(value: Any) -> float | None:
    """90 -> 90.0, '90m' -> 5400.0; None for what is no duration."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value) if 0 < value < math.inf else None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhd])", str(value))
    seconds = float(match[1]) * UNITS[match[2]] if match else 0.0
    return seconds or None


def _mapping(name: str, value: Any, known: Sequence[str], problems: list[str]) -> dict[str, Any]:
    """The known keys of a section."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        problems.append(f"{name}={value!r} must hold {', '.join(known)}.")
        return {}
    for key in value:
        if key not in known:
            near = suggestion(str(key), known) or f" There are {', '.join(known)}."
            problems.append(f"{name}.{key} is unknown.{near}")
    return {str(key): item for key, item in value.items() if key in known and item is not None}
